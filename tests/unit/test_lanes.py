"""Messages between two ends: whole, in order, in memory of the receiver's own, and without ever blocking a sender."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import socket
import threading
from typing import Any

import numpy as np
import pytest
from tests.unit.lanes import KINDS, LARGE, WAIT_S, End, raising, socket_pair

from colocate.testing.probes.starved import without_descriptors
from colocate.wire import EventLoop, encode, pack, unpack
from colocate.wire.framing import FILE_BYTES

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("size", [0, 5000, FILE_BYTES // 8 + 1, 1 << 20])
def test_messages_both_ways(ends: tuple[End, End], size: int) -> None:
    value = {"x": np.arange(size), "y": [np.ones(3), "text"]}
    for sender, receiver in (ends, ends[::-1]):
        assert sender.lane.send(("call", 7, None))
        assert sender.lane.send(("call", 8), pack(value))
        assert receiver.get() == (("call", 7, None), None)
        head, got = receiver.get()
        assert head == ("call", 8)
        np.testing.assert_array_equal(got["x"], value["x"])
        assert got["y"][1] == "text"


def test_what_is_sent_is_what_was_there_at_that_moment(half: tuple[End, socket.socket], event_loop: EventLoop) -> None:
    """The sender may change its memory at once, also when nothing could be written yet; that blocks nobody."""
    end, other = half
    array = np.zeros(LARGE)
    count = 40
    for i in range(count):
        array[:] = i
        assert end.lane.send((i,), pack(array))
    far = End(event_loop, other)
    for i in range(count):
        head, got = far.get()
        assert head == (i,)
        assert (got == i).all()
    assert end.lane.drain(WAIT_S)


def test_a_broadcast_is_one_copy_and_each_receiver_has_its_own(event_loop: EventLoop) -> None:
    pairs = [[End(event_loop, sock) for sock in socket_pair(kind)] for kind in ("unix", "unix", "tcp")]
    array = np.zeros(LARGE)
    with encode(("all",), pack(array)) as frame:
        for one, _ in pairs:
            assert one.lane.send(frame)
    received = [other.get()[1] for _, other in pairs]
    for i, got in enumerate(received):
        assert not got.any()
        got[:] = i + 1
    assert [got[0] for got in received] == [1, 2, 3]
    assert not array.any()


def test_closing_tells_both_sides_once(ends: tuple[End, End]) -> None:
    one, other = ends
    one.lane.close("enough")
    one.lane.close("again")
    assert one.end() == "enough"
    assert other.end() == "the other side closed"
    assert one.lane.closed
    assert other.lane.closed
    for end in ends:
        assert end.lane.send(("late",)) is False
        assert end.lane.send(("late",), pack(np.arange(LARGE))) is False
        with encode(("late",)) as frame:
            assert end.lane.send(frame) is False
        assert end.lane.drain(WAIT_S) is False
        assert end.ends.empty()


def test_what_was_sent_before_closing_still_arrives(ends: tuple[End, End]) -> None:
    one, other = ends
    for i in range(50):
        one.lane.send((i,), pack(np.arange(LARGE // 4)))
    assert one.lane.drain(WAIT_S)
    one.lane.close()
    assert [other.get()[0][0] for _ in range(50)] == list(range(50))
    assert other.end() == "the other side closed"


@pytest.mark.parametrize("where", [3, 25, 100_000])
def test_the_other_side_ends_in_the_middle_of_a_message(half: tuple[End, socket.socket], where: int) -> None:
    end, other = half
    with encode(("x",), pack(bytes(200_000))) as frame:
        other.sendall(frame._inline[:where])
    other.close()
    assert end.end() == "the other side closed in the middle of a message"
    assert end.messages.empty()


def test_garbage_ends_the_lane(half: tuple[End, socket.socket]) -> None:
    end, other = half
    reported: list[Any] = []
    hook, threading.excepthook = threading.excepthook, reported.append
    try:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n" * 3)
        assert "do both sides run the same colocate?" in end.end()
    finally:
        threading.excepthook = hook
    assert [report.exc_type for report in reported] == [ValueError]


def test_a_callback_that_raises_ends_its_lane_only(event_loop: EventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    bad, good = ([End(event_loop, sock) for sock in socket_pair("unix")] for _ in range(2))
    bad[0].lane._on_message = raising
    bad[1].lane.send(("missing",))
    assert bad[0].end() == "handling a message raised KeyError: 'raised'"
    assert bad[1].end() == "the other side closed"
    good[1].lane.send(("fine",))
    assert good[0].get()[0] == ("fine",)
    good[0].lane._on_closed = raising
    good[1].lane.close()
    assert good[1].end() == "closed on this side"
    assert event_loop.close(WAIT_S)
    assert [report.exc_type for report in reported] == [KeyError, KeyError]
    assert all(report.thread.name == "colocate-test" for report in reported)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lane_is_finished_after_what_arrived_although_the_other_end_is_open(kind: str) -> None:
    """As when a child of a dead process still holds its socket; with a descriptor that `select` couldn't take."""
    event_loop = EventLoop("test", own_thread=False)
    low, other = socket_pair(kind)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with low, other:
        one = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024 if most > 1024 else 0))
        end = End(event_loop, one)
        for i in range(3):
            with encode((i,), pack(bytes(50_000))) as frame:
                other.sendall(frame._inline)
        end.lane.finish("its process ended")
        assert [end.get()[0] for _ in range(3)] == [(0,), (1,), (2,)]
        assert end.end() == "its process ended"
        end.lane.finish("again")
        assert end.ends.empty()
    assert event_loop.close()


def test_a_file_for_which_there_is_no_descriptor(ends: tuple[End, End]) -> None:
    """Who unpacks it is told; what follows it is read as ever."""
    near, far = ends
    with encode(("large",), pack(np.arange(LARGE))) as large, encode(("small",), pack("fine")) as small:
        with without_descriptors():
            far.lane.send(large)
            far.lane.send(small)
            head, body = near.messages.get(timeout=WAIT_S)
            assert near.get() == (("small",), "fine")
        assert head == ("large",)
        assert body is not None
        with contextlib.suppress(OSError) if not near.lane._passes_files else pytest.raises(OSError, match="ulimit"):
            unpack(body)
        far.lane.send(large)
        assert near.get()[0] == ("large",)

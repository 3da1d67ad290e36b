"""Messages arrive whole, in order and in the receiver's own memory, without ever blocking a sender.

The file also covers the end of an event loop, and lanes in a forked child.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.forking import exit_code, fork
from tests.suite.probes.starved import without_descriptors, without_threads
from tests.unit.lanes import KINDS, LARGE, WAIT_S, End, raising, socket_pair

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


def test_send_snapshots_memory_without_blocking(half: tuple[End, socket.socket], event_loop: EventLoop) -> None:
    """A sender may change its memory right after a send, which blocks nobody, even if nothing could be written yet."""
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


def test_broadcast_receivers_have_separate_copies(event_loop: EventLoop) -> None:
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
    assert one.lane.is_closed
    assert other.lane.is_closed
    for end in ends:
        assert end.lane.send(("late",)) is False
        assert end.lane.send(("late",), pack(np.arange(LARGE))) is False
        with encode(("late",)) as frame:
            assert end.lane.send(frame) is False
        assert end.lane.drain(WAIT_S) is False
        assert end.ends.empty()


def test_messages_sent_before_close_arrive(ends: tuple[End, End]) -> None:
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


def test_raising_callback_ends_only_one_lane(event_loop: EventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_finished_lane_delivers_arrived_messages(kind: str) -> None:
    """A finished lane gives all arrived messages, even if a dead process's child holds the other end open."""
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
    """A file without a free descriptor is an error for the reader that unpacks it; later messages arrive."""
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


def test_an_event_loop_that_an_exception_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that ends an event loop is its lanes' reason, and the owner's; the loop can still be closed."""
    reported: list[type] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: reported.append(told.exc_type))
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def leave() -> None:
        raise SystemExit("on purpose")

    event_loop = EventLoop("test", on_death=told.put)
    one, other = (End(event_loop, sock) for sock in socket_pair("unix"))
    event_loop.call_later(0.0, leave)
    reason = "thread 'colocate-test' was ended by SystemExit: on purpose"
    assert told.get(timeout=WAIT_S) == reason
    assert (one.end(), other.end()) == (reason, reason)
    assert event_loop.close(WAIT_S)
    assert reported == [SystemExit]


@pytest.mark.parametrize("dies", [False, True])
def test_without_a_thread(dies: bool) -> None:
    """A loop without a thread refuses lanes and timers with an error, leaves nothing, and serves the next ones."""
    event_loop = EventLoop("test")
    one, other = socket_pair("unix")
    with other:
        with without_threads(dies):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                event_loop.attach(one, lambda head, body: None, lambda reason: None)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                event_loop.call_later(0.0, lambda: None)
        ran = threading.Event()
        event_loop.call_later(0.0, ran.set)
        assert ran.wait(WAIT_S)
        near, far = End(event_loop, one), End(event_loop, other)
        far.lane.send(("heard",))
        assert near.get() == (("heard",), None)
        assert event_loop.close()


def in_fork(action: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Return whether the action is true in a forked child, which ends after `meanwhile` in the parent."""
    read, write = os.pipe()
    child = fork()
    if child == 0:
        try:
            fine = action()
            os.close(write)
            os.read(read, 1)  # Until the parent has closed its end.
            os._exit(0 if fine else 1)
        finally:
            os._exit(2)
    try:
        os.close(read)
        meanwhile()
    finally:
        os.close(write)
        code = exit_code(child, WAIT_S)
    return code == 0


def test_a_forked_child_keeps_no_lane_alive_and_disturbs_none(ends: tuple[End, End], event_loop: EventLoop) -> None:
    one, other = ends
    for i in range(40):  # Some of it is still queued in the parent when it forks.
        one.lane.send((i,), pack(bytes(1 << 20)))
    inherited = {
        one.lane.fileno(),
        other.lane.fileno(),
        event_loop._wake_receiver.fileno(),
        event_loop._wake_sender.fileno(),
        event_loop._epoll.fileno(),
    }

    def child() -> bool:
        gone = all(not os.path.exists(f"/proc/self/fd/{fd}") for fd in inherited)
        refuses = not one.lane.send(("from the child",)) and not other.lane.drain()
        one.lane.close()
        return gone and refuses and event_loop.close()

    def meanwhile() -> None:
        assert [other.get()[0][0] for _ in range(40)] == list(range(40))
        other.lane.send(("alive",))
        assert one.get() == (("alive",), None)
        one.lane.close()
        assert one.end() == "closed on this side"
        assert other.end() == "the other side closed"  # While the child still lives.

    assert in_fork(child, meanwhile)


def test_a_fork_while_the_locks_are_held(ends: tuple[End, End], event_loop: EventLoop) -> None:
    one, _ = ends

    def child() -> bool:
        one.lane.close()
        return event_loop.close() and not one.lane.send(("x",))

    with one.lane._lock, event_loop._lock:
        assert in_fork(child)

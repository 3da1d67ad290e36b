"""What is sent by steps that nothing comes in between: gates, and lanes whose writers take no lock."""

from __future__ import annotations

import os
import socket
import threading
from itertools import chain, count
from typing import Any

import pytest
from tests.forking import exit_code, fork
from tests.unit.lanes import KINDS, LARGE, WAIT_S, End, socket_pair

from colocate._signals import at_once
from colocate._signals.at_once import Gate
from colocate.testing.waiting import wait_until
from colocate.wire import HOLE, EventLoop, SocketLane, numbered, pack, posting


def post(lane: SocketLane, number: int, body: Any = None, name: str = "post") -> bool:
    """Send a message by steps, as the order of a group does; False where it can't be."""
    frame = numbered((name, HOLE), 1, None if body is None else pack(body))
    posted = posting([lane], [frame])
    if posted is None:
        return False
    frame.puts[0](number)
    try:
        at_once.run(chain(posted.queues, posted.writes))
    except OSError:
        posted.mend()
    return True


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest, event_loop: EventLoop) -> tuple[End, End]:
    one, other = socket_pair(request.param)
    return End(event_loop, one), End(event_loop, other)


def test_a_gate() -> None:
    """It lets steps pass while there is no reason against that, and takes nothing from what would come then."""
    gate, numbers, taken = Gate(1), count(), list[int]()

    def take() -> None:
        at_once.run(at_once.when([map(taken.append, map(next, [numbers]))], gate.passes))

    take()
    gate.shut("one")
    gate.shut("another")
    take()
    gate.open("one")
    take()
    assert taken == [0]
    gate.open("another")
    take()
    assert taken == [0, 1]
    child = fork()  # where it is shut, whoever opens it
    if child == 0:
        gate.open("anything")
        os._exit(len(gate.passes))
    assert exit_code(child, WAIT_S) == 0
    assert gate.passes


def test_numbers_are_put_in_at_last(ends: tuple[End, End]) -> None:
    """The same frame has whatever number was put into it; one of several has each. What is large isn't posted."""
    for number in (1, 2**40):
        assert post(ends[0].lane, number, [number])
        assert ends[1].get() == (("post", number), [number])
    frame = numbered(("several", [(HOLE, "a"), (HOLE + 1, "b")]), 2)
    for put, number in zip(frame.puts, (7, 8), strict=True):
        put(number)
    posted = posting([ends[0].lane], [frame])
    assert posted is not None
    at_once.run(chain(posted.queues, posted.writes))
    assert ends[1].get()[0] == ("several", [(7, "a"), (8, "b")])
    for size in (20_000, 1 << 20):  # sent, it has its number, too, as bytes and as a file
        frame = numbered(("large", HOLE), 1, pack(bytes(size)))
        assert posting([ends[0].lane], [frame]) is None
        frame.puts[0](9)
        with frame:
            assert ends[0].lane.send(frame)
        head, body = ends[1].get()
        assert (head, len(body)) == (("large", 9), size)


def test_posted_and_sent_in_one_order(ends: tuple[End, End]) -> None:
    """Whoever sends what, and however large: each thread's messages come in their order, and whole."""

    def sends(name: str, posts: bool) -> None:
        for number in range(300):
            body = bytes(number % 7 * 700)
            if posts:
                assert post(ends[0].lane, number, body, name)
            else:
                assert ends[0].lane.send((name, number), pack(bytes(LARGE) if number % 50 == 0 else body))

    names = {"p1": True, "p2": True, "s1": False, "s2": False}
    threads = [threading.Thread(target=sends, args=each) for each in names.items()]
    for thread in threads:
        thread.start()
    got = [ends[1].get() for _ in range(1200)]
    for thread in threads:
        thread.join()
    for name in names:
        assert [head[1] for head, _ in got if head[0] == name] == list(range(300))
    assert ends[0].lane.drain(WAIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_does_not_read(event_loop: EventLoop, kind: str) -> None:
    """It keeps nobody who posts; the event loop writes the rest when there is room."""
    one, other = socket_pair(kind)
    end, sent = End(event_loop, one), 2000
    for number in range(sent):
        assert post(end.lane, number, bytes(3000))
    assert end.lane.send(("last",))
    far = End(event_loop, other)
    assert [far.get()[0][1] for _ in range(sent)] == list(range(sent))
    assert far.get()[0] == ("last",)


def test_what_somebody_else_has_written(event_loop: EventLoop) -> None:
    """Whoever isn't the one that writes takes nothing out of the queue, though the message has been written by then."""
    one, other = socket.socketpair()
    end, number = End(event_loop, one), 0
    while not end.lane._queue:  # until the socket is full, and the event loop has to write
        assert post(end.lane, number, bytes(3000))
        number += 1
    frame = numbered(("post", HOLE), 1)
    posted = posting([end.lane], [frame])
    assert posted is not None
    frame.puts[0](number)
    at_once.run(posted.queues)
    far = End(event_loop, other)
    assert [far.get()[0][1] for _ in range(number + 1)] == list(range(number + 1))
    wait_until(lambda: not end.lane._queue, "the event loop has written all")
    at_once.run(posted.writes)
    assert end.lane.send(("goes on",))
    assert far.get()[0] == ("goes on",)

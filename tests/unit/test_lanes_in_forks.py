"""Lanes and other processes: a peer that is killed, and forked children."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from tests.unit.lanes import WAIT_S, End

from colocate.testing.forking import exit_code, fork
from colocate.wire import EventLoop, pack

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def in_fork(action: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Whether the action is true in a forked child; it ends after what the parent does meanwhile."""
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
        event_loop._woken.fileno(),
        event_loop._waker.fileno(),
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

"""Lanes and other processes: a peer that is killed, and forked children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.unit.lanes import KINDS, WAIT_S, End, socket_pair

from colocate.testing.forking import exit_code, fork
from colocate.wire import EventLoop, Turns, pack, track

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_peer_ends_the_lane_and_frees_everything(event_loop: EventLoop, kind: str) -> None:
    here, there = socket_pair(kind)
    code = f"import socket, time; sock = socket.socket(fileno={there.fileno()}); print(flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=[there.fileno()], stdout=subprocess.PIPE) as process:
        there.close()
        assert process.stdout is not None
        process.stdout.readline()
        end = End(event_loop, here)
        for i in range(30):
            assert end.lane.send((i,), pack(bytes(1 << 20)))
        process.send_signal(signal.SIGKILL)
        assert end.end() == "the other side closed"


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


def test_a_forked_child_keeps_no_unsent_memory() -> None:
    event_loop = EventLoop("test", own_thread=False)
    one, other = socket_pair("unix")
    with other:
        end = End(event_loop, one)
        while not end.lane._queue:
            end.lane.send(("x",), pack(bytes(100_000)))
        end.lane.send(("x",), pack(bytes(1 << 20)))
        assert any("memfd" in name for name in open_files())
        assert in_fork(lambda: not any("memfd" in name for name in open_files()))
        assert event_loop.close()


def open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass  # The descriptor that listed the others.
    return names


def test_a_fork_while_the_locks_are_held(ends: tuple[End, End], event_loop: EventLoop) -> None:
    one, _ = ends

    def child() -> bool:
        one.lane.close()
        return event_loop.close() and not one.lane.send(("x",))

    with one.lane._lock, event_loop._lock:
        assert in_fork(child)


def test_what_cannot_be_forgotten_keeps_nothing_else(ends: tuple[End, End], event_loop: EventLoop) -> None:
    """Whatever goes wrong with one inherited thing, the others are closed in the child."""

    class Stubborn:
        def forget(self) -> None:
            raise OSError("not this one")

    stubborn = [Stubborn() for _ in range(20)]  # in a set of weak references nobody knows which comes first
    for each in stubborn:
        track(each)
    inherited = {end.lane.fileno() for end in ends} | {
        event_loop._woken.fileno(),
        event_loop._waker.fileno(),
        event_loop._epoll.fileno(),
    }
    said: list[str] = []

    def child() -> bool:
        gone = all(not os.path.exists(f"/proc/self/fd/{fd}") for fd in inherited)
        return (
            gone and event_loop.close() and len(said) == 1 and said[0].count("OSError: not this one") == len(stubborn)
        )

    before, sys.unraisablehook = sys.unraisablehook, lambda what: said.append(getattr(what.exc_value, "message", ""))
    try:
        assert in_fork(child)
    finally:
        sys.unraisablehook = before
        stubborn.clear()


def test_a_turn_that_is_over_takes_nobodys_descriptor(ends: tuple[End, End]) -> None:
    turns = Turns(ends[0].lane)
    turns.close()
    with open(os.devnull) as somebodys:  # has the number that was the turn's
        assert in_fork(lambda: os.path.exists(f"/proc/self/fd/{somebodys.fileno()}"))

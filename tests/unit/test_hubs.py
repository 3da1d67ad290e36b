"""Hubs: who runs them, how they end, and what else they watch."""

from __future__ import annotations

import os
import queue
import socket
import threading
from typing import Any

import pytest
from tests.unit.lanes import WAIT_S, End, raising, socket_pair

from colocate.errors import ClosedError
from colocate.testing.probes.starved import without_threads
from colocate.wire import EventLoop, Packed, connect, listen, new_key

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_hub_can_run_on_the_calling_thread() -> None:
    event_loop = EventLoop("test", own_thread=False)
    one, other = (End(event_loop, sock) for sock in socket_pair("unix"))
    seen: list[Any] = []

    def on_message(head: tuple[Any, ...], body: Packed | None) -> None:
        seen.append((head, threading.current_thread()))
        assert event_loop.close() is False  # On its own thread it only asks for it.

    other.lane._on_message = on_message
    one.lane.send(("stop",))
    event_loop.run()
    assert seen == [(("stop",), threading.current_thread())]
    assert (one.end(), other.end()) == ("the event loop was closed",) * 2
    assert event_loop.close()


def test_a_closed_hub_takes_nothing_any_more(event_loop: EventLoop) -> None:
    assert event_loop.close(WAIT_S)
    assert event_loop.close(WAIT_S)
    one, other = socket.socketpair()
    with one, other, pytest.raises(ClosedError, match="event loop 'test' is closed"):
        End(event_loop, one)


def test_what_cannot_be_closed_keeps_nobody_waiting(event_loop: EventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that can't be closed is reported, and the rest is closed."""
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    listener = listen("unix")
    event_loop.listen(listener, new_key(), raising)
    with monkeypatch.context() as patch:
        patch.setattr(listener, "close", raising)
        one, other = (End(event_loop, sock) for sock in socket_pair("unix"))
        assert event_loop.close(WAIT_S)
    assert (one.end(), other.end()) == ("the event loop was closed",) * 2
    assert [each.exc_type for each in reported] == [KeyError]
    listener.close()


def test_who_comes_as_it_closes_is_sent_away(event_loop: EventLoop) -> None:
    """A connection that is accepted while the event loop is told to close is no fault of anybody."""
    refused: queue.Queue[Exception] = queue.Queue()

    def accept(sock: socket.socket) -> None:
        event_loop.close()
        try:
            End(event_loop, sock)
        except ClosedError as error:
            refused.put(error)
            raise

    key = new_key()
    listener = listen("unix")
    event_loop.listen(listener, key, accept)
    with connect(listener.address, key, WAIT_S) as sock:
        assert sock.recv(1) == b""
    assert "event loop 'test' is closed" in str(refused.get(timeout=WAIT_S))


def test_watching_other_descriptors(event_loop: EventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    read, write = os.pipe()
    lines: queue.Queue[bytes] = queue.Queue()

    def on_readable() -> None:
        if data := os.read(read, 1000):
            lines.put(data)
        else:
            event_loop.unwatch(read)
            lines.put(b"the end")

    event_loop.watch(read, on_readable)
    os.write(write, b"one")
    assert lines.get(timeout=WAIT_S) == b"one"
    os.close(write)
    assert lines.get(timeout=WAIT_S) == b"the end"
    event_loop.unwatch(read)
    os.close(read)

    read, write = os.pipe()
    event_loop.watch(read, raising)
    os.write(write, b"x")
    one, other = (End(event_loop, sock) for sock in socket_pair("unix"))
    one.lane.send(("still",))
    assert other.get()[0] == ("still",)
    assert event_loop.close(WAIT_S)
    assert [report.exc_type for report in reported] == [KeyError]
    os.close(read)
    os.close(write)


def test_a_timer_in_a_month_lets_it_go_on(event_loop: EventLoop) -> None:
    """The operating system takes no such time."""
    event_loop.later(40 * 86400.0, raising)
    one, other = (End(event_loop, sock) for sock in socket_pair("unix"))
    one.lane.send(("still",))
    assert other.get()[0] == ("still",)


def test_a_hub_that_an_exception_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lanes end with that as their reason, its owner is told, and it closes as any other."""
    reported: list[type] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: reported.append(told.exc_type))
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def leave() -> None:
        raise SystemExit("on purpose")

    event_loop = EventLoop("test", on_death=told.put)
    one, other = (End(event_loop, sock) for sock in socket_pair("unix"))
    event_loop.later(0.0, leave)
    reason = "thread 'colocate-test' was ended by SystemExit: on purpose"
    assert told.get(timeout=WAIT_S) == reason
    assert (one.end(), other.end()) == (reason, reason)
    assert event_loop.close(WAIT_S)
    assert reported == [SystemExit]


def test_without_a_thread() -> None:
    """What needs its thread first is told that none is to be had, and leaves nothing; the next is served."""
    event_loop = EventLoop("test")
    one, other = socket_pair("unix")
    with other:
        with without_threads():
            with pytest.raises(RuntimeError, match="can't start new thread"):
                event_loop.attach(one, lambda head, body: None, lambda reason: None)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                event_loop.later(0.0, lambda: None)
        ran = threading.Event()
        event_loop.later(0.0, ran.set)
        assert ran.wait(WAIT_S)
        near, far = End(event_loop, one), End(event_loop, other)
        far.lane.send(("heard",))
        assert near.get() == (("heard",), None)
        assert event_loop.close()

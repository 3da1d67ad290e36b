"""Hubs: who runs them, how they end, and what else they watch."""

from __future__ import annotations

import queue
import threading

import pytest
from tests.unit.lanes import WAIT_S, End, socket_pair

from colocate.testing.probes.starved import without_threads
from colocate.wire import EventLoop

pytestmark = pytest.mark.usefixtures("nothing_is_left")


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

"""Holds: which of several failures is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from colocate._calls.order import CallOrder
from colocate._calls.pending import PendingCall
from colocate._owned.dispatcher import Dispatcher
from colocate._protocol.consequence import Unmade
from colocate._protocol.from_worker import Failed, Failure, Held
from colocate._protocol.to_worker import Hold, Resume
from colocate.errors import RoleError
from colocate.testing.waiting import PATIENCE_S


class Sent:
    """A group of two workers that notes what it sends them; no time passes."""

    name, grace, closed_by, base, size, forked = "two", PATIENCE_S, None, 0, 2, False

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.seen: list[tuple[list[int], tuple[Any, ...]]] = []
        self.services = SimpleNamespace(timers=self, dispatcher=dispatcher)

    def send(self, slots: list[int], head: tuple[Any, ...], body: Any = None) -> None:
        self.seen.append((slots, head))

    def after(self, seconds: float, then: Callable[[], object]) -> SimpleNamespace:
        return SimpleNamespace(cancel=lambda: None)

    def live(self) -> list[int]:
        return [0, 1]

    def node(self, slot: int) -> str:
        return f"node{slot}"


@pytest.mark.parametrize("kinds", [(Unmade, RuntimeError), (RuntimeError, Unmade)])
def test_what_says_more_is_told(kinds: tuple[type[BaseException], ...]) -> None:
    """Of ranks that have failed since a connection was lost, it is one whose role has raised, whoever was first."""
    dispatcher = Dispatcher("test")
    link: Any = Sent(dispatcher)
    order = CallOrder(link)
    call = PendingCall("role.method", "role", "method", [0, 1])
    with order.lock:
        order.enter(call)
    for slot, kind in enumerate(kinds):
        failure = Failure(f"{kind.__module__}.{kind.__qualname__}", f"of {slot}", "", False, True, "role", None)
        order.failed(slot, Failed(call.seq, failure, {}, 0, False, 0.0, 1.0), None)
        assert not call.done()  # the other one may say more
    number = next(message.number for _, message in link.seen if isinstance(message, Hold))
    for slot in link.live():
        order.held(slot, Held(number, 0, {}, []))
    assert isinstance(link.seen[-1][1], Resume)
    error = call.exception(PATIENCE_S)
    assert isinstance(error, RoleError)
    slot = kinds.index(RuntimeError)
    assert (error.rank, error.node) == (slot, f"node{slot}")
    assert dispatcher.close()

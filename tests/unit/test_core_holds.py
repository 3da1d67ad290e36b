"""Holds: what the driver tells the ranks of a call that nobody waits for any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@pytest.fixture
def link() -> Iterator[Sent]:
    dispatcher = Dispatcher("test")
    yield Sent(dispatcher)
    dispatcher.close()


@pytest.fixture
def order(link: Sent) -> Any:
    return CallOrder(link)  # type: ignore[arg-type]


def entered(order: Any, name: str = "method") -> PendingCall:
    """A call that both workers have been sent."""
    call = PendingCall(f"role.{name}", "role", name, [0, 1])
    with order.lock:
        order.enter(call)
    return call


def fails(order: Any, call: PendingCall, slot: int, kind: type[BaseException] | str) -> None:
    """It has raised there, after a connection had been lost."""
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    failure = Failure(name, f"of {slot}", "", False, True, "role", None)
    order.failed(slot, Failed(call.seq, failure, {}, 0, False, 0.0, 1.0), None)


def back(order: Any, link: Sent) -> None:
    """Both workers are."""
    number = next(message.number for _, message in link.seen if isinstance(message, Hold))
    for slot in link.live():
        order.held(slot, Held(number, 0, {}, []))
    assert isinstance(link.seen[-1][1], Resume)


@pytest.mark.parametrize("kinds", [(Unmade, "builtins.RuntimeError"), ("builtins.RuntimeError", Unmade)])
def test_what_says_more_is_told(order: Any, link: Sent, kinds: tuple[Any, Any]) -> None:
    """Of ranks that have failed since a connection was lost, it is one whose role has raised, whoever was first."""
    call = entered(order)
    for slot, kind in enumerate(kinds):
        fails(order, call, slot, kind)
        assert not call.done()
    back(order, link)
    error = call.exception(PATIENCE_S)
    assert isinstance(error, RoleError)
    slot = kinds.index("builtins.RuntimeError")
    assert (error.rank, error.node) == (slot, f"node{slot}")


def test_what_is_suspected_of_another_call(order: Any, link: Sent) -> None:
    """It follows from what was suspected first, also where its role has raised."""
    first, second = entered(order, "first"), entered(order, "second")
    fails(order, first, 0, Unmade)
    fails(order, second, 1, "builtins.RuntimeError")
    back(order, link)
    assert second.exception(PATIENCE_S).__cause__ == first.exception()  # type: ignore[union-attr]

"""Holds: whose they are, and which of several failures is told."""

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
from colocate.errors import ColocateError, RoleError, WorkerDied
from colocate.testing.waiting import PATIENCE_S


class Sent:
    """A group of two workers that notes what it sends them; time passes when `later` is done."""

    name, grace, closed_by, base, size, forked = "two", PATIENCE_S, None, 0, 2, False

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.seen: list[tuple[list[int], tuple[Any, ...]]] = []
        self.later: list[Callable[[], object]] = []
        self.left: set[int] = set()
        self.services = SimpleNamespace(timers=self, dispatcher=dispatcher)

    def send(self, slots: list[int], head: tuple[Any, ...], body: Any = None) -> None:
        self.seen.append((slots, head))

    def after(self, seconds: float, then: Callable[[], object]) -> SimpleNamespace:
        self.later.append(then)
        return SimpleNamespace(cancel=lambda: self.later.remove(then))

    def halted(self, *told: Any) -> None:
        """No feature hears it."""

    ended = halted

    def report_unfinished(self, back: Any) -> None:
        pass

    def all_back(self, hold: Any) -> bool:
        return False

    def live(self) -> list[int]:
        return [0, 1]

    def has_left(self, slot: int) -> bool:
        return slot in self.left

    def stood(self, since: float) -> float:
        return 0.0

    def node(self, slot: int) -> str:
        return f"node{slot}"


@pytest.fixture
def link() -> Iterator[Any]:
    dispatcher = Dispatcher("test")
    yield Sent(dispatcher)
    assert dispatcher.close()


def entered(order: CallOrder) -> PendingCall:
    """A call that both workers have been sent."""
    call = PendingCall("role.method", "role", "method", [0, 1])
    with order.lock:
        order.enter(call)
    return call


def test_a_hold_of_the_generation_before(link: Any) -> None:
    """The new generation's workers are told of their own first failure: nothing was begun with them."""
    order = CallOrder(link)
    order.begin_anew()  # as a rank does that fails when all has been failed
    with order.lock:
        order.renew()
    call = entered(order)
    del link.seen[:]
    order.break_off(call, ColocateError("on purpose"))
    assert link.seen == [([0, 1], Hold(1, call.seq, True))]
    assert isinstance(call.exception(PATIENCE_S), ColocateError)


@pytest.mark.parametrize("kinds", [(Unmade, RuntimeError), (RuntimeError, Unmade)])
def test_what_says_more_is_told(link: Any, kinds: tuple[type[BaseException], ...]) -> None:
    """Of ranks that have failed since a connection was lost, it is one whose role has raised, whoever was first."""
    order = CallOrder(link)
    call = entered(order)
    for slot, kind in enumerate(kinds):
        failure = Failure(f"{kind.__module__}.{kind.__qualname__}", f"of {slot}", "", False, True, "role", None)
        order.failed(slot, Failed(call.seq, failure, {}, 0.0, 1.0), None)
        assert not call.done()  # the other one may say more
    number = next(message.number for _, message in link.seen if isinstance(message, Hold))
    for slot in link.live():
        order.held(slot, Held(number, 0, {}))
    assert isinstance(link.seen[-1][1], Resume)
    error = call.exception(PATIENCE_S)
    assert isinstance(error, RoleError)
    slot = kinds.index(RuntimeError)
    assert (error.rank, error.node) == (slot, f"node{slot}")


@pytest.mark.parametrize("has_left", [True, False])
def test_a_death_that_is_told_late(link: Any, has_left: bool) -> None:
    """A rank has lost a connection, to one that has left: the death is told, however long it is on its way."""
    order = CallOrder(link)
    call = entered(order)
    failure = Failure("builtins.RuntimeError", "Connection closed by peer", "", False, True, "role", None)
    order.failed(0, Failed(call.seq, failure, {}, 0.0, 1.0), None)
    if has_left:
        link.left.add(1)
    settles = link.later[-1]  # the other one that is to come is the grace, in which the first rank comes back
    settles()
    assert call.done() is not has_left  # nobody waits for what doesn't come
    order.gone(1)
    order.fail_all(WorkerDied("worker 1 is gone"))
    assert type(call.exception(PATIENCE_S)) is (WorkerDied if has_left else RoleError)

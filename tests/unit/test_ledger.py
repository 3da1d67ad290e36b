"""The ledger for engines that keep none."""

import threading

import pytest

from colocate.errors import PlacementError, PlacementTimeout
from colocate.executor import Node, Request
from colocate.placement import Ledger
from colocate.testing.waiting import PATIENCE_S, wait_until


@pytest.fixture
def ledger() -> Ledger:
    return Ledger([Node("one", 2), Node("two", 2)], lambda devices: "cpu")


def test_without_a_node(ledger: Ledger) -> None:
    """Nothing is placed there any more, what is held there is told, and giving it back gives nothing of it."""
    both = ledger.reserve(Request(2, strategy="spread"))
    alone = ledger.reserve(Request(1))
    lost, left = ("one", "two") if alone.places[0].node == "two" else ("two", "one")
    assert ledger.without(lost) == [both]
    assert ledger.without(lost) == [both]  # until it is released
    ledger.release(both)
    assert ledger.without("three") == []
    with pytest.raises(PlacementTimeout):
        ledger.reserve(Request(2, timeout=0))
    with pytest.raises(PlacementError, match="can never fit") as caught:
        ledger.reserve(Request(3))
    assert [row["node"] for row in caught.value.nodes] == [left]
    ledger.release(alone)
    assert [place.node for place in ledger.reserve(Request(2, timeout=0)).places] == [left, left]


def test_who_waits_for_a_node_that_is_gone(ledger: Ledger) -> None:
    """It is told at once that it can never fit, and not when its time is over."""
    held = ledger.reserve(Request(1))
    told: list[PlacementError] = []

    def reserve() -> None:
        with pytest.raises(PlacementError) as caught:
            ledger.reserve(Request(4, timeout=10 * PATIENCE_S))
        told.append(caught.value)

    waiter = threading.Thread(target=reserve)
    waiter.start()
    wait_until(lambda: ledger._news._waiters, "it waits")  # type: ignore[attr-defined]
    ledger.without("one")
    waiter.join(PATIENCE_S)
    assert [isinstance(error, PlacementTimeout) for error in told] == [False]
    ledger.release(held)

"""The ledger places slots for engines that have no ledger."""

import threading
from typing import Any

import pytest

from colocate.errors import PlacementError, PlacementTimeout
from colocate.executor import Node, Request
from colocate.placement import Ledger
from colocate.testing.waiting import PATIENCE_S, wait_until


@pytest.fixture
def ledger() -> Ledger:
    return Ledger([Node("one", 2), Node("two", 2)], lambda devices: "cpu")


def test_without_a_node(ledger: Ledger) -> None:
    """A removed node gets no slots, its reservations are listed, and their release frees nothing on it."""
    both = ledger.reserve(Request(2, strategy="spread"))
    alone = ledger.reserve(Request(1))
    lost, left = ("one", "two") if alone.places[0].node == "two" else ("two", "one")
    assert ledger.remove_node(lost) == [both]
    assert ledger.remove_node(lost) == [both]  # until it is released
    ledger.release(both)
    assert ledger.remove_node("three") == []
    with pytest.raises(PlacementTimeout):
        ledger.reserve(Request(2, timeout=0))
    with pytest.raises(PlacementError, match="can never fit") as caught:
        ledger.reserve(Request(3))
    assert [row["node"] for row in caught.value.nodes] == [left]
    ledger.release(alone)
    assert [place.node for place in ledger.reserve(Request(2, timeout=0)).places] == [left, left]


def test_unfittable_request_fails_on_node_removal(ledger: Ledger) -> None:
    """A request that waits fails at once when a node's removal means that it can never fit."""
    held = ledger.reserve(Request(1))
    told: list[PlacementError] = []

    def reserve() -> None:
        with pytest.raises(PlacementError) as caught:
            ledger.reserve(Request(4, timeout=10 * PATIENCE_S))
        told.append(caught.value)

    waiter = threading.Thread(target=reserve)
    waiter.start()
    wait_until(lambda: ledger._news._waiters, "it waits")  # type: ignore[attr-defined]
    ledger.remove_node("one")
    waiter.join(PATIENCE_S)
    assert [isinstance(error, PlacementTimeout) for error in told] == [False]
    ledger.release(held)


def test_places() -> None:
    """Slots are placed on nodes with the wanted labels and resources, together or apart."""
    kinds = {"one": ("A100", "x"), "two": ("H100", "x"), "three": ("H100", "y"), "four": ("H100", "y")}
    nodes = [
        Node(name, 2, labels={"kind": kind, "domain": domain}, resources={"host": 1.5})
        for name, (kind, domain) in kinds.items()
    ]
    ledger = Ledger([Node("none", 9), *nodes], lambda devices: "cpu")

    def found(slots: int, **where: Any) -> list[str]:
        held = ledger.reserve(Request(slots, timeout=0, **where))
        ledger.release(held)
        return [place.node for place in held.places]

    assert found(2, labels={"kind": "A100"}) == ["one", "one"]
    assert found(6, labels={"kind": "H100"}) == ["two", "two", "three", "three", "four", "four"]
    assert found(2, labels={"kind": "in(V100, A100)", "domain": "x"}) == ["one", "one"]
    assert found(1, labels={"kind": "!in(A100,H100)"}) == ["none"]
    assert found(4, resources={"host": 1}) == ["one", "two", "three", "four"]
    assert found(4, resources={"host": 0.5}, labels={"domain": "y"}) == ["three", "three", "four", "four"]
    assert found(2, resources={"host": 1}, together="domain") == ["one", "two"]
    assert found(2, together="domain", labels={"kind": "H100"}, strategy="strict_spread") == ["three", "four"]
    assert found(3, strategy="strict_pack") == ["none"] * 3
    assert found(5, strategy="strict_spread") == ["none", *kinds]
    with pytest.raises(PlacementError, match="of 5 slots with 1 CPU each, all of one domain, can never fit") as caught:
        found(5, together="domain")
    assert [row["labels"] for row in caught.value.nodes[:2]] == ["no domain", "domain=x"]
    with pytest.raises(
        PlacementError, match=r"with 1 CPU, 8\.0 GiB and 2 host each, on nodes with kind=A100, all on one"
    ):
        found(1, host_memory_bytes=2**33, resources={"host": 2}, labels={"kind": "A100"}, strategy="strict_pack")
    held = ledger.reserve(Request(1, resources={"host": 1}, labels={"kind": "A100"}))
    with pytest.raises(PlacementTimeout) as caught:
        found(1, resources={"host": 1}, labels={"kind": "A100"})
    assert [caught.value.nodes[1][column] for column in ("total", "free")] == [
        "2 CPU, 0 GPU, 1.5 host",
        "1 CPU, 0 GPU, 0.5 host",
    ]
    ledger.release(held)
    assert found(1, resources={"host": 1}, labels={"kind": "A100"}) == ["one"]

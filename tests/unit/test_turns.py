"""Who makes room when a role's turn comes: in which order roles are called, and who of them is needed last."""

from __future__ import annotations

import random

import pytest

from colocate.worker.memory.turns import Order, until_it_fits


def told(order: Order, roles: str) -> None:
    """Calls of roles."""
    for role in roles:
        order.begins(role)


def ahead(order: Order) -> str | None:
    """The turns from the one that is on."""
    found = order.ahead()
    return None if found is None else "".join(found)


def test_an_order_that_is_found() -> None:
    """What was gone through twice; calls of one role after each other are one turn."""
    order = Order()
    told(order, "abAcabA")  # "a" and "A" are two roles
    assert ahead(order) is None
    told(order, "c")
    assert ahead(order) == "cabA"
    assert not order.begins("c")
    told(order, "abA")
    assert ahead(order) == "Acab"


def test_an_order_within_another_one() -> None:
    """What is done again and again inside of a step is no step, once the whole has been gone through twice."""
    order = Order()
    told(order, "rxacac")
    assert ahead(order) == "ca"
    told(order, "rxacac")
    assert ahead(order) == "crxaca"
    told(order, "rxacac" + "e" + "rxacac")  # what comes in between changes nothing
    assert ahead(order) == "crxaca"
    told(order, "acacac")  # it does, as this is more than what has come as it was known since
    assert ahead(order) == "ca"


def test_an_order_with_a_gap() -> None:
    """A call that is left out once is no other step: what comes after it is foreseen as before."""
    order = Order()
    told(order, "bac" * 10 + "ac")
    for role, foreseen in zip("bacbacbac", "acbacbacb", strict=True):
        told(order, role)
        assert (found := ahead(order)) is not None
        assert found[:2] == role + foreseen


def test_an_order_that_is_declared() -> None:
    """It is there from the first call on, and is found again after what isn't in it."""
    order = Order(["a", "a", "b", "c", "a"])
    order.begins("a")
    assert ahead(order) == "abc"
    told(order, "bc")
    assert ahead(order) == "cab"
    order.begins("x")
    assert ahead(order) is None
    order.begins("b")
    assert ahead(order) == "bca"


def test_an_order_that_changes() -> None:
    """What is done instead from then on is found; what is done in between isn't lasting."""
    order = Order()
    told(order, "abcabcab")
    assert ahead(order) == "bca"
    told(order, "ca" + "dada")
    assert ahead(order) == "ad"


def test_who_is_needed_last() -> None:
    """Goes first; where nothing is known, who was called longest ago."""
    order = Order()
    told(order, "dabc")
    assert order.by_need("abcd", order.ahead()) == ["d", "a", "b", "c"]
    told(order, "abcabc")
    assert order.by_need("abd", order.ahead()) == ["d", "b", "a"]


@pytest.mark.parametrize("seed", range(50))
def test_no_more_go_than_must(seed: int) -> None:
    """Those that go make room, and none of them could stay; None where all together don't."""
    draw = random.Random(seed)
    sizes = {name: draw.randint(0, 9) for name in "abcdef"}
    excess = draw.randint(-3, sum(sizes.values()) + 3)
    going = until_it_fits("abcdef", sizes, excess)
    if going is None:
        assert sum(sizes.values()) < excess
        return
    left = excess - sum(sizes[each] for each in going)
    assert left <= 0
    assert all(left + sizes[each] > 0 for each in going)

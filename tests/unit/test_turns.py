"""Who of several roles makes room for another one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from colocate.worker.memory.turns import Order, until_it_fits


def ahead(order: Order) -> str | None:
    """The turns of a step, as a word."""
    found = order.ahead()
    return None if found is None else "".join(found)


def told(order: Order, roles: str) -> Order:
    """Call roles one after the other."""
    for role in roles:
        order.begins(role)
    return order


@given(st.text("abcd", min_size=2, max_size=8), st.integers(2, 4))
def test_what_comes_again(step: str, times: int) -> None:
    """Whoever has been through a step twice knows whose turn is next, to its end, and who is needed last."""
    assume(all(one != other for one, other in pairwise(step + step[0])))
    assume(all(step != step[:size] * (len(step) // size) for size in range(1, len(step))))
    assume(all(step[at : at + 2 * size] != 2 * step[at : at + size] for size in (1, 2, 3) for at in range(len(step))))
    order = told(Order(), step * times)
    for number in range(len(step)):
        assert order.begins(step[number])
        following = step[number:] + step[:number]
        assert ahead(order) == following
        needed = sorted(set(step), key=following.find, reverse=True)
        assert order.by_need(set(step), order.ahead()) == needed


@pytest.mark.parametrize(
    ("declared", "calls", "found"),
    [
        ("", "abA", None),
        ("", "abAcabAc", "cabA"),  # "a" and "A" are two roles
        ("", "abAcabAccc", "cabA"),  # a turn goes on
        ("", "rxacac", "ca"),
        ("", "rxacacrxacac", "crxaca"),  # what is done again and again inside of a step is no step
        ("", "rxacacrxacac" + "e" + "rxacac", "crxaca"),  # what comes in between changes nothing
        ("", "rxacacrxacac" + "acacac", "ca"),  # it does, as this is more than what has come since it was known
        ("", "bac" * 10 + "ac" + "ba", "acb"),  # a call that is left out once is no other step
        ("", "abcabcab" + "ca" + "dada", "ad"),  # what is done instead from then on is found
        ("aabca", "a", "abc"),  # there from the first call on
        ("aabca", "abc", "cab"),
        ("aabca", "abcx", None),
        ("aabca", "abcxb", "bca"),  # and found again after what isn't in it
    ],
)
def test_orders(declared: str, calls: str, found: str | None) -> None:
    assert ahead(told(Order(declared), calls)) == found


def test_who_is_needed_last() -> None:
    """Where nothing is known, who was called longest ago goes first; so it is beside a function."""
    order = told(Order(), "dabc")
    assert order.by_need("abcd", order.ahead()) == ["d", "a", "b", "c"]
    told(order, "abcabc")
    assert order.by_need("abd", order.ahead()) == ["d", "b", "a"]
    assert order.by_need("abd", None) == ["d", "a", "b"]


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9)), st.integers(-3, 40))
def test_no_more_go_than_must(sizes: dict[str, int], excess: Any) -> None:
    """Those that go make room, and none of them could stay; None where all together don't."""
    going = until_it_fits(sizes, sizes, excess)
    if going is None:
        assert sum(sizes.values()) < excess
        return
    left = excess - sum(sizes[each] for each in going)
    assert left <= 0
    assert all(left + sizes[each] > 0 for each in going)

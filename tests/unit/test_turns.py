"""Who of several roles makes room for another one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from colocate.features.memory.turns import Order, until_it_fits


def told(order: Order, roles: str) -> Order:
    """Call roles one after the other."""
    for role in roles:
        order.begins(role)
    return order


@pytest.mark.parametrize(
    ("declared", "calls", "needed"),
    [
        ("", "dabc", "dabc"),  # nobody has said when: who was called longest ago
        ("", "dabcca", "dbca"),
        ("abcd", "", "dcba"),  # known from the first call on
        ("abcd", "ab", "badc"),
        ("abcd", "abb", "badc"),  # a turn goes on
        ("aabca", "a", "dacb"),  # "d" has no turn; that of "a" is over
        ("aabca", "abc", "dcba"),
        ("abacd", "aba", "badc"),  # the second turn of "a"
        ("abcd", "abxb", "badc"),  # what isn't in it changes nothing
        ("abcd", "abd", "dcba"),  # nor does what is left out
    ],
)
def test_who_is_needed_last(declared: str, calls: str, needed: str) -> None:
    """Whose next turn is farthest, and among those without one who comes first by name."""
    assert "".join(told(Order(declared), calls).by_need("abcd")) == needed


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

"""Where residents are looked for in arguments, and what looking costs."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import colocate
from colocate import method
from colocate._values.nesting import hides, kinds_inside
from colocate._views.view import _LOOKS
from colocate.errors import RoleError, SerializationError


class Thing:
    """Holds something."""

    def __init__(self, held: Any) -> None:
        self.held = held


class User(colocate.Role):
    """Uses what it gets."""

    @method
    def make(self) -> int:
        """A number."""
        return 3

    @method
    def use(self, things: list[Thing], how: str) -> None:
        """Use the last one as a value."""
        held = things[-1].held
        {
            "torch": lambda: torch.zeros(1) + held,
            "numpy": lambda: np.asarray(held),
            "ufunc": lambda: np.add(np.zeros(1), held),
            "minus": lambda: 1 - held,
            "call": lambda: held(),
        }[how]()


def test_what_lies_too_deep_says_what_it_is_when_it_is_used() -> None:
    """On threads a call looks at so many things; a reference behind them is refused by whatever uses it as a value."""
    with colocate.connect("local") as runtime, runtime.reserve(1, cpus=0) as pool:
        view = pool.spawn({"user": colocate.role(User)}).role("user", User)
        with view.make.keep() as kept:
            for how in ("torch", "numpy", "ufunc", "minus", "call"):
                with pytest.raises(RoleError, match="lives in the workers") as told:
                    view.use([*(Thing(number) for number in range(_LOOKS)), Thing(kept.ref)], how)
                assert isinstance(told.value.__cause__, TypeError)
            with pytest.raises(SerializationError, match="inside a Thing, where nothing puts its value in its place"):
                view.use([*(Thing(number) for number in range(_LOOKS // 4)), Thing(kept.ref)], "torch")


class Wanted:
    """What is looked for."""


@attrs.frozen(eq=False)
class WithSlots:
    """Declares a field, and has no dict."""

    held: Any


@dataclasses.dataclass(eq=False)
class Data:
    """As the standard library's."""

    held: Any


atoms = st.one_of(st.integers(), st.text(max_size=2), st.builds(Wanted), st.builds(object), st.none())
holders = st.sampled_from(
    [
        *(WithSlots, Data, lambda held: [held, 1], lambda held: (held,), lambda held: {"a": held}),
        *(lambda held: deque([held]), lambda held: {WithSlots(held)}, lambda held: {Data(held): 2}),
    ]
)
values = st.recursive(atoms, lambda inner: st.builds(lambda make, held: make(held), holders, inner), max_leaves=6)


@given(st.lists(values, max_size=4))
def test_what_is_hidden_is_known_by_its_type(several: list[Any]) -> None:
    """The quick look finds whatever the thorough one does, in fields, dicts, keys and sets, in all that is given."""
    hidden = any(hides(Data(value), lambda kind: kind is Wanted) for value in several)
    assert not hidden or Wanted in kinds_inside(several)


def test_a_value_that_contains_itself_has_an_end_for_the_quick_look() -> None:
    endless: list[Any] = [Data(1)]
    endless.append(Data(endless))
    assert Data in kinds_inside(endless)

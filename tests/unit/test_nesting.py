"""Nested arguments: the kinds in a value, and the error of a reference that is used as a value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import colocate
from colocate import method
from colocate._values.nesting import collect_kinds
from colocate.errors import RoleError


class Thing:
    def __init__(self, held: Any) -> None:
        self.held = held


class User(colocate.Role):
    """Uses arguments as values."""

    @method
    def make(self) -> int:
        return 3

    @method
    def use(self, thing: Thing, how: str) -> None:
        """Use the held value in the way that `how` names."""
        held = thing.held
        {
            "torch": lambda: torch.zeros(1) + held,
            "numpy": lambda: np.asarray(held),
            "ufunc": lambda: np.add(np.zeros(1), held),
            "minus": lambda: 1 - held,
            "call": lambda: held(),
        }[how]()


def test_nested_reference_used_as_value_raises() -> None:
    """A reference inside an object raises a TypeError with the reason when role code uses it as a value."""
    with colocate.connect("local") as runtime, runtime.reserve(1, cpus=0) as pool:
        view = pool.spawn({"user": colocate.role(User)}).role("user", User)
        with view.make.keep() as kept:
            for how in ("torch", "numpy", "ufunc", "minus", "call"):
                with pytest.raises(RoleError, match="lives in the workers") as told:
                    view.use(Thing(kept.ref), how)
                assert isinstance(told.value.__cause__, TypeError)


def test_a_value_that_contains_itself_has_an_end_for_the_quick_look() -> None:
    endless: list[Any] = [{1: (2, "a")}]
    endless.append({"x": endless})
    assert collect_kinds(endless) == {list, dict, tuple, int, str}

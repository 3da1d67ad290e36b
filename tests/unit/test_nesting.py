"""Where residents are looked for in arguments, and what looking costs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

import colocate
from colocate import method
from colocate._views.sending import _LOOKS
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

    @method
    def nothing(self, thing: Any) -> None:
        """Look at nothing."""


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


def test_looking_has_a_bound() -> None:
    """A large argument is as cheap on threads as a small one but for a bound, and may change while it is looked at."""
    with colocate.connect("local") as runtime, runtime.reserve(1, cpus=0) as pool:
        view = pool.spawn({"user": colocate.role(User)}).role("user", User)

        def fastest(value: Any) -> float:
            times = []
            for _ in range(20):
                began = time.perf_counter()
                view.nothing(value)
                times.append(time.perf_counter() - began)
            return min(times)

        wide = Thing([Thing([Thing(number)]) for number in range(300_000)])
        deep = Thing({number: Thing({number: {1, 2}}) for number in range(100_000)})
        assert max(fastest(wide), fastest(deep)) < fastest(Thing(1)) + 0.01

"""A role class may have type parameters."""

from __future__ import annotations

from typing import Generic, TypeVar

import pytest

import colocate
from colocate import First, Role, method
from colocate.errors import ConfigError

T = TypeVar("T")


class Box(Role, Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    @method(collect=First())
    def get(self) -> T:
        return self.value

    @method(collect=First())
    def beside(self) -> T:
        return self.ctx.sibling("box", Box[T]).value


class Other(Role):
    pass


def test_classes_with_type_arguments() -> None:
    """`Box[int]`, which is for type checkers, is accepted wherever the class is."""
    with colocate.connect() as runtime, runtime.reserve(1) as pool:
        group = pool.spawn({"box": colocate.role(Box[int], 3)})
        assert group.role("box", Box[int]).get() == group[Box[int]].get() == group[Box].beside() == 3
        with pytest.raises(ConfigError, match=r"is a .*:Box, and no .*:Other"):
            group.role("box", Other)

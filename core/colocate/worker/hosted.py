"""A role as its worker has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from colocate._context import Context
from colocate._method import MethodSpec


@attrs.define(eq=False)
class HostedRole:
    """A role instance and what is needed to run its methods; without a name it is what functions run in."""

    name: str | None
    instance: Any
    methods: Mapping[str, MethodSpec]
    ctx: Context
    _labels: Mapping[str, str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # Each call asks for one.
        self._labels = {} if self.name is None else {method: f"{self.name}.{method}" for method in self.methods}

    def spec(self, method: str) -> MethodSpec:
        """One of its methods."""
        return self.methods["run" if self.name is None else method]

    def label(self, method: str) -> str:
        """What a method is called in errors and stacks."""
        return self._labels.get(method) or f"function {method}"

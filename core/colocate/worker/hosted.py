"""A role as its worker has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from colocate._role.context import Context
from colocate._role.method_spec import MethodSpec


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
        named = self.name is not None
        self._labels = {method: f"{self.name}.{method}" if named else method for method in self.methods}

    def spec(self, method: str) -> MethodSpec:
        """One of its methods."""
        if self.name is None:
            return self.methods.get(method) or self.methods["run"]
        return self.methods[method]

    def label(self, method: str) -> str:
        """What a method is called in errors and stacks."""
        return self._labels.get(method) or f"function {method}"

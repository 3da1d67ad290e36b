"""`RoleInfo`: one role of a group, as the driver knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from colocate._role.method_spec import MethodSpec
from colocate._values.mesh import Mesh, Ranks


@attrs.frozen(eq=False)
class RoleInfo:
    """One role of a group, as the driver knows it.

    Attributes:
        name: Its name.
        cls: Its class.
        methods: Its methods by name.
        slots: Its slots in order of rank.
        meshes: Its meshes by name.
        origin: Where its class comes from.
    """

    name: str
    cls: type
    methods: Mapping[str, MethodSpec]
    slots: tuple[int, ...] | range
    meshes: Mapping[str, Mesh]
    origin: str
    key: Any = attrs.field(default=attrs.Factory(lambda self: self.name, takes_self=True), kw_only=True)
    """What workers know it by."""
    ranks: Ranks = attrs.field(
        init=False, default=attrs.Factory(lambda self: Ranks(len(self.slots), self.meshes), takes_self=True)
    )

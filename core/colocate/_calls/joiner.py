"""How a call's value comes about: its ranks' results, unpacked and collected by whoever asks first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colocate._calls.failures import result_of
from colocate._calls.link import Link
from colocate._calls.pending import PendingCall
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._values.mesh import Ranks


class Joiner:
    """Makes a call's value of its ranks' results, for whoever asks first."""

    __slots__ = ("_link", "_role", "_spec")

    def __init__(self, link: Link, role: RoleInfo, spec: MethodSpec) -> None:
        self._link = link
        self._role = role
        self._spec = spec

    def __call__(self, call: PendingCall, bodies: Sequence[Any]) -> Any:
        if call.keep is not None:
            return None
        link = self._link
        results = [
            None if body is None else result_of(link, call, slot, body)  # as often
            for slot, body in zip(call.targets, bodies, strict=True)
        ]
        ranks = self._role.ranks
        if call.targets is not self._role.slots:
            ranks = Ranks(ranks.world_size, ranks.meshes, call.rows, None, call.ranks)
        elif call.rows.count(None) != len(results):
            ranks = Ranks(ranks.world_size, ranks.meshes, call.rows)
        return self._spec.collect.join(results, ranks)

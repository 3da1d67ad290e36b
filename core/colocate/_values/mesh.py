"""Lay out ranks on meshes with named axes.

All methods compute with a few sizes. Nothing is stored or done per rank, so ten thousand ranks cost nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from colocate._system.nearest import did_you_mean
from colocate.errors import ConfigError, DispatchError

PIPELINE_AXIS = "pp"


@attrs.frozen(init=False, repr=False)
class Mesh:
    """A grid of ranks with named axes, in row-major order, so that the last axis varies fastest.

    An axis that the mesh lacks has size 1.
    """

    axes: tuple[tuple[str, int], ...]
    world_size: int = attrs.field(eq=False)
    _strides: Mapping[str, tuple[int, int]] = attrs.field(eq=False)

    def __init__(self, shape: Mapping[str, int]) -> None:
        strides, stride = {}, 1
        for axis, size in reversed(list(shape.items())):
            strides[axis] = stride, size
            stride *= size
        self.__attrs_init__(tuple(shape.items()), stride, strides)  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        return f"Mesh({self.shape})"

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis, in order."""
        return dict(self.axes)

    def size(self, axis: str) -> int:
        """Return the size of an axis."""
        return self._strides.get(axis, (1, 1))[1]

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of a rank along an axis."""
        stride, size = self._strides.get(axis, (1, 1))
        return rank // stride % size

    def matches_layout(self, axis: str, other: Mesh, other_axis: str) -> bool:
        """Return whether every rank has the same position along this axis as along another mesh's axis."""
        mine, others_stride = self._strides.get(axis, (1, 1)), other._strides.get(other_axis, (1, 1))
        return mine == others_stride or mine[1] == others_stride[1] == 1

    def line(self, rank: int, axis: str) -> range:
        """Return the ranks that differ from this rank only along an axis, in order (this rank included)."""
        stride, size = self._strides.get(axis, (1, 1))
        start = rank - self.coordinate(rank, axis) * stride
        return range(start, start + size * stride, stride)

    def leaders(self, axis: str) -> range:
        """Return, for each position on an axis, the first rank of the last pipeline stage there."""
        stage = 0
        if axis != PIPELINE_AXIS:
            stride, size = self._strides.get(PIPELINE_AXIS, (1, 1))
            stage = (size - 1) * stride
        return self.line(stage, axis)


@functools.cache
def get_default_meshes(world_size: int) -> dict[str, Mesh]:
    """Return the meshes of a role that declares none, which is one mesh with the single axis `dp`."""
    return {"": Mesh({"dp": world_size})}


@attrs.frozen
class Ranks:
    """The ranks of one call, with the data that dispatch and collect use.

    `meshes` maps names to meshes; the unnamed mesh has the name "". Sequences with an item per rank follow `targets`.
    """

    world_size: int
    meshes: Mapping[str, Mesh] = attrs.field(
        default=attrs.Factory(lambda self: get_default_meshes(self.world_size), takes_self=True), repr=False
    )
    rows: Sequence[int | None] | None = None
    """For a collect: the real rows of each rank, None for unknown ones; None if no numbers are known."""
    padded: Sequence[int | None] | None = None
    """For a collect: the rows of each rank with padding; None without padding."""
    targets: Sequence[int] | None = None
    """The ranks to call, in order; None for all."""
    partition: Sequence[Sequence[int]] | None = None
    """For a collect: the row indices of each rank, if `Scatter(balance=...)` chose the rows."""

    def mesh(self, name: str | None = None) -> Mesh:
        """Return the mesh with a name; without a name, return the unnamed or only mesh.

        Raises:
            DispatchError: There is no such mesh, or there are several and none was named.
        """
        match = self.meshes.get(name or "")
        if match is not None:
            return match
        names = ", ".join(map(repr, self.meshes))
        if name:
            has = "no named one" if "" in self.meshes else names
            raise DispatchError(f"the role has no mesh {name!r}; it has {has}{did_you_mean(name, self.meshes)}")
        if len(self.meshes) == 1:
            return next(iter(self.meshes.values()))
        raise DispatchError(f"the role has several meshes ({names}): say which one with mesh=")

    def pick(self, items: Sequence[Any], ranks: Sequence[int]) -> Sequence[Any]:
        """Return the items of these ranks, from a sequence with one item per called rank."""
        if self.targets is None:
            if isinstance(ranks, range) and ranks == range(self.world_size):
                return items
            return [items[rank] for rank in ranks]
        places = {rank: place for place, rank in enumerate(self.targets)}
        return [items[places[rank]] for rank in ranks]

    def leaders(self, axis: str, mesh: str | None = None) -> Sequence[int]:
        """Return, for each position on an axis with called ranks, one called rank, chosen as in `Mesh.leaders`."""
        where = self.mesh(mesh)
        if self.targets is None:
            return where.leaders(axis)
        best: dict[int, tuple[int, int]] = {}
        for rank in self.targets:
            stage = 0 if axis == PIPELINE_AXIS else where.coordinate(rank, PIPELINE_AXIS)
            place, key = where.coordinate(rank, axis), (-stage, rank)
            best[place] = min(best.get(place, key), key)
        return [best[place][1] for place in sorted(best)]


def parse_meshes(spec: Mapping[str, Any] | None, slots: int) -> dict[str, Mesh]:
    """Parse declared meshes, which may be None (one axis, `dp`), one mesh, or several meshes by name."""
    if spec is None:
        return get_default_meshes(slots)
    if not isinstance(spec, Mapping) or not spec:
        raise ConfigError(f"mesh={spec!r}: a mesh is a mapping from axes to sizes, such as {{'dp': {slots}}}")
    nested = [isinstance(value, Mapping) for value in spec.values()]
    if any(nested) and not all(nested):
        raise ConfigError(f"mesh={dict(spec)!r}: give either the axes of one mesh or several named meshes, not both")
    if not any(nested):
        return {"": _parse_mesh("mesh", spec, slots)}
    for name, axes in spec.items():
        if not isinstance(name, str) or not name or not axes:
            raise ConfigError(f"mesh {name!r}: a mesh needs a name and at least one axis, such as {{'dp': {slots}}}")
    return {name: _parse_mesh(f"mesh {name!r}", axes, slots) for name, axes in spec.items()}


def _parse_mesh(where: str, axes: Mapping[Any, Any], slots: int) -> Mesh:
    for axis, size in axes.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise ConfigError(f"{where}: {axis!r} is no name for an axis; use a word, such as 'dp'")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(
                f"{where}: the size of the axis {axis!r} is {size!r}; it has to be a whole number from 1 up"
            )
    product = math.prod(axes.values())
    if product != slots:
        shown = " x ".join(f"{axis}={size}" for axis, size in axes.items())
        raise ConfigError(
            f"{where}: {shown} makes {product} ranks, but the role has {slots} slots; change the sizes or the slots "
            "so that they are equal"
        )
    return Mesh(axes)

"""Which ranks share a role's process groups, and what these are called: the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from colocate._role.context import Context, MeshPlace
from colocate._system.nearest import did_you_mean
from colocate.errors import CapabilityError, ConfigError


def needs_processes(what: str, ctx: Context) -> CapabilityError:
    """The error where the slots are threads, which torch can give no groups of their own."""
    return CapabilityError(
        f"{what} needs a process each, but the slots of group {ctx.group!r} are threads of one: use "
        "connect('local', processes=True), in a config executor.with.processes=true",
        capability="OwnProcess",
        executors=("local with processes=True",),
        role=ctx.role,
        rank=ctx.rank,
    )


def members(ctx: Context, axis: str | None) -> tuple[Sequence[int], int, str]:
    """The slots of those that share the group, which of them this rank is, and a name that they agree on."""
    role = ctx.role or ""
    if axis is None:
        return ctx.slots, ctx.rank, f"{role}/*"
    mesh, place, axis = _place(ctx, axis)
    if place is None:
        return [ctx.slot], 0, f"{role}/{axis}/{ctx.rank}"
    if place.size(axis) == ctx.world_size:
        return members(ctx, None)
    ranks = place.mesh.line(ctx.rank, axis)
    others = [f"{other}={place.rank(other)}" for other in place.shape if other != axis]
    return [ctx.slots[rank] for rank in ranks], place.rank(axis), f"{role}/{mesh}.{axis}/{','.join(others)}"


def mesh_of(ctx: Context, name: str | None) -> tuple[str, MeshPlace]:
    """A mesh of the role by its name, or its only one."""
    if name is None and len(ctx.meshes) == 1:
        return next(iter(ctx.meshes.items()))
    if name is None or name not in ctx.meshes:
        known = " or ".join(repr(each) for each in ctx.meshes if each) or "none that has a name"
        asked = "" if name is None else repr(name)
        raise ConfigError(
            f"ctx.device_mesh({asked}): role {ctx.role!r} has {known}; say which"
            f"{did_you_mean(name, ctx.meshes) if name else ''}"
        )
    return name, ctx.meshes[name]


def _place(ctx: Context, axis: str) -> tuple[str, MeshPlace | None, str]:
    """The mesh that an axis belongs to, by name and as this rank lies in it, and the axis without the mesh's name."""
    named, dot, rest = axis.rpartition(".")
    if dot:
        if named not in ctx.meshes:
            raise ConfigError(
                f"ctx.process_group({axis!r}): role {ctx.role!r} has no mesh {named!r}{did_you_mean(named, ctx.meshes)}"
            )
        return (named, ctx.meshes[named], rest) if rest in ctx.meshes[named].shape else (named, None, rest)
    found = [(name, place) for name, place in ctx.meshes.items() if axis in place.shape]
    if len(found) > 1:
        known = " or ".join(repr(f"{name}.{axis}") for name, _ in found)
        raise ConfigError(
            f"ctx.process_group({axis!r}): several meshes of role {ctx.role!r} have such an axis; say which: {known}"
        )
    return (*found[0], axis) if found else ("", None, axis)

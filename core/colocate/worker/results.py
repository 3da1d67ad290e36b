"""Checks a method's result before the result is stored or sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colocate._role.context import Context
from colocate._role.method_spec import MethodSpec
from colocate._values import batch
from colocate._values.collect import Concat
from colocate._values.mesh import Ranks
from colocate.errors import DispatchError


def count_joined_rows(result: Any, spec: MethodSpec, ctx: Context) -> int | None:
    """Return a stored result's number of rows for later slicing; None if the result can't be sliced.

    Ranks whose results aren't used, such as those of a pipeline's earlier stages, may have no rows.
    """
    if not isinstance(spec.collect, Concat):
        return None
    try:
        return batch.get_row_count(result, f"the result of {spec.name}")
    except DispatchError:
        if is_counted(spec, ctx):
            raise
        return None


def is_counted(spec: MethodSpec, ctx: Context) -> bool:
    """Return whether a call to all ranks uses this rank's result."""
    return ctx.rank in list_sources(spec, ctx)


def list_sources(spec: MethodSpec, ctx: Context) -> Sequence[int]:
    """Return the ranks whose results a call to all ranks uses."""
    meshes = {name: place.mesh for name, place in ctx.meshes.items()}
    return spec.collect.sources(Ranks(ctx.world_size, meshes))


def strip_padding(result: Any, rows: int, valid: int | None, label: str) -> Any:
    """Remove the padding rows from the result of a method with `pad=True`."""
    count = batch.get_row_count(result, f"the result of {label}")
    if count != rows:
        raise DispatchError(
            f"{label} got {rows} rows, padding included, and returned {count}: with pad=True it returns a row for each"
        )
    return result if valid is None or valid == rows else batch.slice_rows(result, 0, valid)

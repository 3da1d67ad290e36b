"""What becomes of a method's result before it is kept or sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colocate._role.context import Context
from colocate._role.method_spec import MethodSpec
from colocate._values import batch
from colocate._values.collect import Concat
from colocate._values.mesh import Ranks
from colocate.errors import DispatchError


def rows_to_join(result: Any, spec: MethodSpec, ctx: Context) -> int | None:
    """Rows of a kept result, where others may ask for some of them.

    Ranks whose results don't count, such as those of a pipeline's earlier stages, need have none.
    """
    if not isinstance(spec.collect, Concat):
        return None
    try:
        return batch.rows(result, f"the result of {spec.name}")
    except DispatchError:
        if counts(spec, ctx):
            raise
        return None


def counts(spec: MethodSpec, ctx: Context) -> bool:
    """Whether a call that goes to all ranks looks at the result of this one."""
    return ctx.rank in sources_of(spec, ctx)


def sources_of(spec: MethodSpec, ctx: Context) -> Sequence[int]:
    """The ranks whose results a call that goes to all ranks looks at."""
    meshes = {name: place.mesh for name, place in ctx.meshes.items()}
    return spec.collect.sources(Ranks(ctx.world_size, meshes))


def without_padding(result: Any, rows: int, valid: int | None, label: str) -> Any:
    """The result of a method with `pad=True`, real rows only."""
    found = batch.rows(result, f"the result of {label}")
    if found != rows:
        raise DispatchError(
            f"{label} got {rows} rows, padding included, and returned {found}: with pad=True it returns a row for each"
        )
    return result if valid is None or valid == rows else batch.slice_rows(result, 0, valid)

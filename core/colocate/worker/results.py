"""What becomes of a method's result before it is kept or sent."""

from __future__ import annotations

from typing import Any

from colocate import _batch
from colocate._collect import Concat
from colocate._method import MethodSpec
from colocate.errors import DispatchError


def rows_to_join(result: Any, spec: MethodSpec) -> int | None:
    """Rows of a kept result, where others may ask for some of them."""
    if not isinstance(spec.collect, Concat):
        return None
    return _batch.rows(result, f"the result of {spec.name}")


def without_padding(result: Any, rows: int, valid: int | None, label: str) -> Any:
    """The result of a method with `pad=True`, real rows only."""
    found = _batch.rows(result, f"the result of {label}")
    if found != rows:
        raise DispatchError(
            f"{label} got {rows} rows, padding included, and returned {found}: with pad=True it returns a row for each"
        )
    return result if valid is None or valid == rows else _batch.slice_rows(result, 0, valid)

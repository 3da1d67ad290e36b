"""verl's `DataProto`, as colocate sends and keeps it: as its tensors and arrays, and not packed into a file's bytes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from verl.protocol import DataProto  # pyright: ignore[reportMissingImports]

import colocate


def _split(data: Any, sizes: Sequence[int]) -> list[Any]:
    ends = itertools.accumulate(sizes)
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _leaves(data: Any) -> Mapping[str, Any]:
    return {"batch": data.batch, "non_tensor_batch": data.non_tensor_batch, "meta_info": data.meta_info}


def _rebuild(cls: type, leaves: Mapping[str, Any]) -> Any:
    return cls(**leaves)


colocate.register_batch(DataProto, length=len, split=_split, concat=DataProto.concat, leaves=_leaves, rebuild=_rebuild)

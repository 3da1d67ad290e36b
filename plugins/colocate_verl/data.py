"""Register verl's `DataProto` as a batch, so that colocate sends tensors and arrays instead of pickled bytes."""

import itertools
from collections.abc import Sequence
from typing import Any

from verl.protocol import DataProto  # pyright: ignore[reportMissingImports]

import colocate


def _split_data(data: Any, sizes: Sequence[int]) -> list[Any]:
    return [data[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


colocate.register_batch(
    DataProto,
    length=len,
    split=_split_data,
    concat=DataProto.concat,
    leaves=lambda data: {"batch": data.batch, "non_tensor_batch": data.non_tensor_batch, "meta_info": data.meta_info},
    rebuild=lambda cls, leaves: cls(**leaves),
)

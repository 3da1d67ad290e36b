"""Transfers of values: between roles of one worker, and to a worker process and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tests.bench.measure import side_by_side
from tests.bench.rows import Row
from torch import Tensor

import colocate
from colocate import First, Role, method

_HERE = "a resident passed between roles of one slot"
_THERE = "a 64 MB tensor there and back, processes"
_BYTES = 64 << 20


class Holder(Role):
    """A role that makes tensors, and returns the addresses of given ones."""

    @method(collect=First())
    def make(self, count: int) -> Tensor:
        return torch.ones(count, dtype=torch.uint8)

    @method(collect=First())
    def where(self, value: Tensor) -> int:
        return value.data_ptr()

    @method(collect=First())
    def echo(self, value: Tensor) -> Tensor:
        return value


def rows() -> Iterator[Row]:
    for kind in ("threads", "processes"):
        yield Row(_HERE, f"bytes moved, {kind}", _moved(kind == "processes"), "B", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _there_and_back()
    finally:
        torch.set_num_threads(threads)


def _moved(processes: bool) -> int:
    with colocate.connect("local", processes=processes) as runtime, runtime.reserve() as pool:
        group = pool.spawn({"maker": colocate.role(Holder), "user": colocate.role(Holder)})
        maker, user = group.role("maker", Holder), group.role("user", Holder)
        value = maker.make.keep(_BYTES)
        addresses = {maker.where(value.ref), user.where(value.ref), user.where(user.echo.keep(value.ref).ref)}
        return 0 if len(addresses) == 1 else _BYTES


def _there_and_back() -> Iterator[Row]:
    value = torch.ones(_BYTES, dtype=torch.uint8)
    with colocate.connect("local", processes=True) as runtime, runtime.reserve() as pool:
        holder = pool.spawn({"holder": colocate.role(Holder)}).role("holder", Holder)
        timed = side_by_side(
            {
                "echo": lambda: holder.echo(value),
                "clone": lambda: (value.clone(), value.clone()),
            },
            rounds=10,
            calls=5,
        )
    yield Row(_THERE, "time", timed["echo"].least * 1e3, "ms")
    yield Row(_THERE, "to two fresh clones", timed["echo"].over(timed["clone"]), "x", 2)

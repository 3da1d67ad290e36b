"""Registered types of a user, and roles that use these types."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import colocate
from colocate import Concat, Gather, Role, Scatter, method
from colocate.testing.probes import import_optional
from colocate.testing.probes.tensors import Tensors

if TYPE_CHECKING:
    import torch
else:
    torch = import_optional("torch")


class Block:
    """A user's type with rows."""

    def __init__(self, rows: list[int], name: str) -> None:
        self.rows = rows
        self.name = name


def _split_block(block: Block, sizes: Sequence[int]) -> list[Block]:
    ends = itertools.accumulate(sizes)
    return [Block(block.rows[end - size : end], block.name) for end, size in zip(ends, sizes, strict=True)]


def _concat_blocks(blocks: Sequence[Block]) -> Block:
    return Block([row for block in blocks for row in block.rows], blocks[0].name)


colocate.register_batch(Block, length=lambda block: len(block.rows), split=_split_block, concat=_concat_blocks)


class Blocks(Role):
    """A role that computes with blocks."""

    @method(dispatch=Scatter("block", pad=True), collect=Concat())
    def tripled(self, block: Block) -> Block:
        return Block([3 * row for row in block.rows], f"{block.name} tripled")


class Packing:
    """A user's type with tensors and registered leaves, whose pickling packs its tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        self.tensors = tensors
        self.name = name
        self.was_packed = False

    def __len__(self) -> int:
        return len(self.tensors["x"])

    def __getstate__(self) -> tuple[bytes, str]:
        file = io.BytesIO()
        torch.save({key: tensor.detach() for key, tensor in self.tensors.items()}, file)
        return file.getvalue(), self.name

    def __setstate__(self, state: tuple[bytes, str]) -> None:
        self.tensors, self.name, self.was_packed = torch.load(io.BytesIO(state[0])), state[1], True


class Opaque(Packing):
    """A type that is registered without leaves."""


def _split_tensors(value: Any, sizes: Sequence[int]) -> list[Any]:
    parts = {key: tensor.split(list(sizes)) for key, tensor in value.tensors.items()}
    return [
        type(value)({key: tensor[index] for key, tensor in parts.items()}, value.name) for index in range(len(sizes))
    ]


def _concat_tensors(parts: Sequence[Any]) -> Any:
    first = parts[0]
    return type(first)({key: torch.cat([part.tensors[key] for part in parts]) for key in first.tensors}, first.name)


colocate.register_batch(
    Packing,
    length=len,
    split=_split_tensors,
    concat=_concat_tensors,
    leaves=lambda value: {"tensors": value.tensors, "name": value.name},
    rebuild=lambda kind, leaves: kind(**leaves),
)
colocate.register_batch(Opaque, length=len, split=_split_tensors, concat=_concat_tensors)


class Packed(Tensors):
    """A role that computes with types that hold tensors."""

    @method(collect=Concat())
    def made_of_own_type(self, rows: int, opaque: bool = False) -> Packing:
        """Return a value of a user's type, with a tensor that has a graph."""
        weight = torch.full((), 3.0, requires_grad=True, device=self.ctx.device)
        self.returned = torch.arange(float(rows), device=self.ctx.device)
        return (Opaque if opaque else Packing)({"x": self.returned, "grad": self.returned * weight}, "made")

    @method(dispatch=Scatter("value"), collect=Gather())
    def facts_of_own_type(self, value: Packing) -> dict[str, Any]:
        grad = value.tensors["grad"]
        return {
            "rows": grad.tolist(),
            "name": value.name,
            "requires_grad": grad.requires_grad,
            "device": str(grad.device) == str(self.ctx.device),
            "was_packed": value.was_packed,
        }

    @method(dispatch=Scatter("value"), collect=Gather())
    def write_into_own_type(self, value: Packing) -> None:
        """Write into an argument, which no method may do."""
        value.tensors["x"].add_(1.0)

"""A role that says where the tensors of its arguments are. Needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from colocate import Concat, Context, Gather, PerRank, Role, Scatter, method

if TYPE_CHECKING:
    import torch


@attrs.frozen
class Batch:
    """A record of a user's."""

    tokens: Any
    texts: tuple[str, ...] = ()


def places(value: Any) -> Any:
    """The devices of the tensors in a value, in its structure."""
    if isinstance(value, dict):
        return {key: places(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [places(item) for item in value]
    if isinstance(value, Batch):
        return places(value.tokens)
    if hasattr(value, "parameters"):
        return [str(parameter.device) for parameter in value.parameters()]
    return str(value.device) if hasattr(value, "device") else value


def places_in(ctx: Context, value: Any) -> Any:
    """The same, as a plain function on a worker."""
    return places(value)


class Placed(Role):
    """Looks at its arguments, and nothing else."""

    def __init__(self, given: Any = None) -> None:
        self.given = places(given)

    @method
    def constructed(self) -> Any:
        """Where the constructor's argument was."""
        return self.given

    @method
    def broadcast(self, x: Any) -> Any:
        """An argument for all."""
        return places(x)

    @method(dispatch=Scatter("x"), collect=Gather())
    def scattered(self, x: Any) -> Any:
        """Rows."""
        return places(x)

    @method(dispatch=PerRank("x"))
    def each(self, x: Any) -> Any:
        """One for each."""
        return places(x)

    @method(dispatch=Scatter("x", "lengths"), collect=Gather(), host=("lengths", "more"))
    def mixed(self, x: Any, lengths: Any, *, more: Any = None) -> Any:
        """Some of them stay on the host."""
        return places([x, lengths, more])

    @method(concurrency=2)
    async def soon(self, x: Any) -> Any:
        """Beside others."""
        return places(x)

    @method(collect=Concat())
    def make(self, rows: int) -> torch.Tensor:
        """A tensor on the host, whatever the slot's device."""
        import torch

        return torch.ones(rows, 2)

    @method
    def make_record(self) -> Any:
        """A record of a user's."""
        return Batch(self.make(1))

"""Roles on tensors, for tests of memory, autograd, writes in place and random numbers. All need torch."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from colocate import Concat, First, Gather, Reduce, Role, Scatter, method
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch
else:
    torch = import_optional("torch")


class Tensors(Role):
    """A role that creates tensors, keeps references to them, and writes where methods must not write."""

    def __init__(self) -> None:
        self.returned: Any = None
        self.stored_argument: Any = None

    @method(collect=Concat())
    def make(self, rows: int, fill: float | None = None) -> torch.Tensor:
        """Return a tensor with `rows` elements, which are different on all ranks unless `fill` is given."""
        device = self.ctx.device
        filled = torch.arange(float(rows), device=device) + 100.0 * self.ctx.rank
        filled = filled if fill is None else torch.full_like(filled, fill)
        self.returned = filled
        return filled

    @method
    def make_uncollected(self, rows: int) -> list[torch.Tensor]:
        """Return a tensor, and disable the garbage collector until `is_there` is called with `collects`."""
        gc.collect()
        gc.disable()
        tensor = torch.arange(float(rows), device=self.ctx.device)
        self.weak = weakref.ref(tensor)
        return [tensor]

    @method
    def is_there(self, collects: bool = False) -> bool:
        """Return whether the tensor of `make_uncollected` still exists."""
        if collects:
            gc.enable()
        return self.weak() is not None

    @method(dispatch=Scatter("x"), collect=Concat())
    def add(self, x: torch.Tensor, y: float = 1.0) -> torch.Tensor:
        return x + y

    @method(dispatch=Scatter("x"), collect=Gather())
    def seen(self, x: torch.Tensor) -> list[float]:
        return [float(item) for item in x]

    @method(collect=Gather())
    def whole(self, x: torch.Tensor) -> list[float]:
        return [float(item) for item in x]

    @method(dispatch=Scatter("x", pad=True), collect=Concat())
    def padded(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, torch.full_like(x, float(len(x)))], dim=1)

    @method(dispatch=Scatter("x"), collect=Reduce("mean"))
    def mean(self, x: torch.Tensor) -> dict[str, float]:
        return {"mean": float(x.mean())}

    @method(collect=First())
    def echo(self, value: Any) -> Any:
        return value

    @method(collect=Gather())
    def facts(self, x: torch.Tensor) -> dict[str, Any]:
        return {
            "requires_grad": x.requires_grad,
            "inference": x.is_inference(),
            "device": str(x.device) == str(self.ctx.device),
            "dtype": str(x.dtype),
        }

    @method(collect=Concat())
    def under_inference_mode(self, rows: int) -> torch.Tensor:
        with torch.inference_mode():
            return torch.arange(float(rows), device=self.ctx.device) * 2

    @method(collect=Concat())
    def with_gradient(self, rows: int) -> dict[str, torch.Tensor]:
        """Return a parameter, and a tensor that was computed from the parameter."""
        weight = torch.nn.Parameter(torch.arange(float(rows), device=self.ctx.device))
        return {"made": weight * 3, "weight": weight}

    @method(collect=Gather())
    def train_on(self, x: torch.Tensor) -> float:
        scale = torch.ones((), requires_grad=True, device=x.device)
        (x * scale).sum().backward()  # type: ignore[no-untyped-call]
        assert scale.grad is not None
        return float(scale.grad)

    @method(dispatch=Scatter("x"), collect=Gather())
    def write_into(self, x: torch.Tensor) -> None:
        """Change the argument in place, which no method may do."""
        x.add_(1.0)

    @method(dispatch=Scatter("x"), collect=Gather())
    def hold_on_to(self, x: torch.Tensor) -> None:
        self.stored_argument = x

    @method
    def write_into_what_it_returned(self) -> None:
        self.returned.add_(1.0)

    @method
    def write_behind_the_version(self) -> None:
        """Write into a returned tensor in a way that torch's version counter doesn't record."""
        self.returned.numpy()[:] = -1.0

    @method
    def write_into_what_was_given(self) -> None:
        self.stored_argument.add_(1.0)

    @method(dispatch=Scatter("x"), collect=Gather())
    def address_of_rows(self, x: torch.Tensor) -> int:
        return x.untyped_storage().data_ptr()

    @method
    def require_grad(self, tensors: dict[str, torch.Tensor]) -> list[bool]:
        return [tensor.requires_grad for tensor in tensors.values()]

    @method
    def own_address(self) -> int:
        address: int = self.returned.untyped_storage().data_ptr()
        return address

    @method
    def keep_and_write(self, x: torch.Tensor, on_rank: int) -> list[float]:
        """Change the argument on one rank, and return each rank's values to show which ranks see the change."""
        self.stored_argument = x
        if self.ctx.rank == on_rank:
            x.zero_()
        return [float(item) for item in x]

    @method
    def still_has(self) -> list[float]:
        return [float(item) for item in self.stored_argument]

    @method
    def total(self, x: torch.Tensor) -> float:
        return float(x.sum())

    @method(collect=Concat())
    def random(self, rows: int) -> torch.Tensor:
        return torch.rand(rows, generator=self.ctx.generator, device=self.ctx.device)

    @method(collect=Concat())
    def random_but(self, rows: int, failing: int) -> torch.Tensor:
        """Draw random numbers as `random` does, but raise on rank `failing` afterwards."""
        drawn = torch.rand(rows, generator=self.ctx.generator, device=self.ctx.device)
        if failing == self.ctx.rank:
            raise ValueError("a bad draw")
        return drawn

    @method(collect=Concat())
    def random_from_start(self, rows: int) -> torch.Tensor:
        generator = torch.Generator(device=self.ctx.device).manual_seed(self.ctx.generator.initial_seed())
        return torch.rand(rows, generator=generator, device=self.ctx.device)

    @method
    def device(self) -> tuple[str, int]:
        return str(self.ctx.device), torch.get_num_threads()

    @method
    def fail(self, given: object = None) -> None:
        raise ValueError("no tensor today")

"""Roles on tensors: memory, autograd, writes in place, random numbers. Each needs torch."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import colocate
from colocate import Concat, First, Gather, Reduce, Role, Scatter, method
from colocate.features import FEATURES
from colocate.testing.probes import optional

if TYPE_CHECKING:
    import torch
else:
    torch = optional("torch")


import io
from collections.abc import Callable, Mapping, Sequence

from colocate import PerRank
from colocate.testing.gate import pass_gate_async


class Packing:
    """A type of a user's own with tensors, which packs them when it is pickled, and has leaves."""

    def __init__(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        self.tensors = tensors
        self.name = name
        self.was_packed = False

    def __len__(self) -> int:
        return len(self.tensors["x"])

    def __getstate__(self) -> tuple[bytes, str]:
        file = io.BytesIO()
        torch.save({key: each.detach() for key, each in self.tensors.items()}, file)
        return file.getvalue(), self.name

    def __setstate__(self, state: tuple[bytes, str]) -> None:
        self.tensors, self.name, self.was_packed = torch.load(io.BytesIO(state[0])), state[1], True


class Opaque(Packing):
    """A type that is registered without leaves."""


def _split(value: Any, sizes: Sequence[int]) -> list[Any]:
    parts = {key: each.split(list(sizes)) for key, each in value.tensors.items()}
    return [type(value)({key: each[index] for key, each in parts.items()}, value.name) for index in range(len(sizes))]


def _concat(parts: Sequence[Any]) -> Any:
    first = parts[0]
    return type(first)({key: torch.cat([each.tensors[key] for each in parts]) for key in first.tensors}, first.name)


if "kinds" in FEATURES:
    colocate.register_batch(
        Packing,
        length=len,
        split=_split,
        concat=_concat,
        leaves=lambda value: {"tensors": value.tensors, "name": value.name},
        rebuild=lambda kind, leaves: kind(**leaves),
    )
    colocate.register_batch(Opaque, length=len, split=_split, concat=_concat)


class Tensors(Role):
    """Makes tensors, keeps them, writes where it shouldn't."""

    def __init__(self) -> None:
        self.returned: Any = None
        self.given: Any = None

    @method(collect=Concat())
    def make(self, rows: int, fill: float | None = None) -> torch.Tensor:
        """So many rows on each rank, all different unless filled."""
        device = self.ctx.device
        made = torch.arange(float(rows), device=device) + 100.0 * self.ctx.rank
        made = made if fill is None else torch.full_like(made, fill)
        self.returned = made
        return made

    @method
    def make_uncollected(self, rows: int) -> list[torch.Tensor]:
        """Rows in a process whose garbage collector doesn't run, until `is_there` is asked with `collects`."""
        gc.collect()
        gc.disable()
        made = torch.arange(float(rows), device=self.ctx.device)
        self.weak = weakref.ref(made)
        return [made]

    @method
    def is_there(self, collects: bool = False) -> bool:
        """Whether what `make_uncollected` has made is still there."""
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
        """A tensor that hangs on a graph, and a parameter."""
        weight = torch.nn.Parameter(torch.arange(float(rows), device=self.ctx.device))
        return {"made": weight * 3, "weight": weight}

    @method(collect=Concat())
    def made_of_own_type(self, rows: int, opaque: bool = False) -> Packing:
        """A value of a user's type, with a tensor that hangs on a graph."""
        weight = torch.full((), 3.0, requires_grad=True, device=self.ctx.device)
        self.returned = torch.arange(float(rows), device=self.ctx.device)
        return (Opaque if opaque else Packing)({"x": self.returned, "grad": self.returned * weight}, "made")

    @method(dispatch=Scatter("value"), collect=Gather())
    def facts_of_own_type(self, value: Packing) -> dict[str, Any]:
        each = value.tensors["grad"]
        return {
            "rows": each.tolist(),
            "name": value.name,
            "requires_grad": each.requires_grad,
            "device": str(each.device) == str(self.ctx.device),
            "was_packed": value.was_packed,
        }

    @method(dispatch=Scatter("value"), collect=Gather())
    def write_into_own_type(self, value: Packing) -> None:
        """Do what no method may do."""
        value.tensors["x"].add_(1.0)

    @method(collect=Gather())
    def train_on(self, x: torch.Tensor) -> float:
        scale = torch.ones((), requires_grad=True, device=x.device)
        (x * scale).sum().backward()  # type: ignore[no-untyped-call]
        assert scale.grad is not None
        return float(scale.grad)

    @method(dispatch=Scatter("x"), collect=Gather())
    def write_into(self, x: torch.Tensor) -> None:
        """Do what no method may do: change the argument in place."""
        x.add_(1.0)

    @method(dispatch=Scatter("x"), collect=Gather())
    def hold_on_to(self, x: torch.Tensor) -> None:
        self.given = x

    @method
    def write_into_what_it_returned(self) -> None:
        self.returned.add_(1.0)

    @method
    def write_behind_the_version(self) -> None:
        """A write that torch's version counter doesn't see."""
        self.returned.numpy()[:] = -1.0

    @method
    def write_into_what_was_given(self) -> None:
        self.given.add_(1.0)

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
        """One rank changes its copy of an argument, to see who notices. Every rank then says what it has."""
        self.given = x
        if self.ctx.rank == on_rank:
            x.zero_()
        return [float(item) for item in x]

    @method
    def still_has(self) -> list[float]:
        return [float(item) for item in self.given]

    @method
    def total(self, x: torch.Tensor) -> float:
        return float(x.sum())

    @method(collect=Concat())
    def random(self, rows: int) -> torch.Tensor:
        return torch.rand(rows, generator=self.ctx.generator, device=self.ctx.device)

    @method(collect=Concat())
    def random_but(self, rows: int, failing: int) -> torch.Tensor:
        """The same, and a rank raises after it has drawn."""
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


def takes_a_step(model: Any, optimizer: Any) -> bool:
    """Whether a step of an optimizer changes a model's weights."""
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer.zero_grad()
    model(torch.ones(1, 2, device=before[0].device)).sum().backward()
    optimizer.step()
    return not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


class Trainer(Role):
    """Trains a model that it is given, or gives away, with its optimizer."""

    def __init__(self, model: Any = None, optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer

    @method(collect=First())
    def step(self) -> bool:
        return takes_a_step(self.model, self.optimizer)

    @method(collect=First())
    def step_with(self, model: Any, optimizer: Any) -> bool:
        """With arguments; what can be called makes the optimizer."""
        return takes_a_step(model, optimizer() if callable(optimizer) else optimizer)

    @method(collect=First())
    def step_with_both(self, both: Any) -> bool:
        return takes_a_step(*both)

    @method(collect=First())
    def make(self, listed: bool = False) -> Any:
        """A model and its optimizer, or a list of its parameters."""
        model = torch.nn.Linear(2, 2)
        return model, list(model.parameters()) if listed else torch.optim.SGD(model.parameters(), lr=1.0)


def _through_operators(value: Any) -> None:
    value["x"].add_(1.0)


def _through_data(value: Any) -> None:
    value["x"].data[0] = 7.0


def _other_data(value: Any) -> None:
    value["x"].data = torch.full((3,), 7.0)


def _through_numpy(value: Any) -> None:
    value["x"].numpy()[...] = 7.0


def _through_a_view(value: Any) -> None:
    value["x"].detach().view(3, 1).numpy()[1, 0] = 7.0


def _into_an_integer_tensor(value: Any) -> None:
    value["pair"][0].data.zero_()


def _into_an_array(value: Any) -> None:
    value["pair"][1][...] = 7


def _into_a_view_of_an_array(value: Any) -> None:
    value["pair"][1].reshape(4)[3] = 7


def _deep_inside(value: Any) -> None:
    value["deep"]["list"][1][0].numpy()[0] = 7.0


def _other_item(value: Any) -> None:
    value["deep"]["list"].append(1)


def _other_key(value: Any) -> None:
    value["deep"]["name"] = "changed"


WRITES: Mapping[str, Callable[[Any], None]] = {
    "operators": _through_operators,
    "data": _through_data,
    "other data": _other_data,
    "numpy": _through_numpy,
    "a view": _through_a_view,
    "an integer tensor": _into_an_integer_tensor,
    "an array": _into_an_array,
    "a view of an array": _into_a_view_of_an_array,
    "deep inside": _deep_inside,
    "another item": _other_item,
    "another key": _other_key,
}


class Mourned(Role):
    """Makes values and uses them in each way there is, and knows which of them are still there."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []

    @method(collect=Concat())
    def make(self) -> torch.Tensor:
        made = torch.arange(4.0)
        self.made.append(weakref.ref(made))
        return made

    @method
    def use(self, value: torch.Tensor) -> float:
        return float(value.sum())

    @method
    async def wait(self, value: torch.Tensor) -> float:
        return float(value.sum())

    @method
    def fail(self, value: torch.Tensor) -> None:
        raise ValueError(f"{value.sum()} is no good")

    @method
    async def fail_later(self, value: torch.Tensor) -> None:
        raise ValueError(f"{value.sum()} is no good")

    @method(rows="row")
    async def each(self, row: int, value: torch.Tensor) -> float:
        return row * float(value.sum())

    @method(collect=First())
    def left(self) -> int:
        """How many of those made are still there."""
        gc.collect()
        return sum(made() is not None for made in self.made)


class Writer(Role):
    """Makes a nested value, and changes it."""

    def __init__(self) -> None:
        self.returned: Any = None
        self.held: Any = None

    @method(collect=First())
    def nested(self) -> dict[str, Any]:
        """Tensors and arrays in dicts, tuples and lists."""
        import numpy

        self.returned = {
            "x": torch.arange(3.0),
            "pair": (torch.arange(2, 4), numpy.arange(4).reshape(2, 2)),
            "deep": {"name": "as it was", "list": [1, (torch.ones(2),)]},
        }
        made: dict[str, Any] = self.returned
        return made

    @method
    def hold(self, value: Any) -> None:
        self.held = value

    @method
    def write(self, value: Any, how: str) -> None:
        WRITES[how](value)

    @method(dispatch=PerRank("gate"), concurrency=2)
    async def write_later(self, value: Any, how: str | None, gate: Any) -> None:
        """A rank with a gate writes when that is open, if it is told how; another call may run beside this one."""
        if gate is not None:
            await pass_gate_async(gate)
            if how is not None:
                WRITES[how](value)

    @method
    def write_held(self, how: str) -> None:
        WRITES[how](self.held)

    @method
    def write_returned(self, how: str) -> None:
        WRITES[how](self.returned)

    @method
    def untouched(self) -> float:
        return 1.0

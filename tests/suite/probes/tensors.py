"""Roles on tensors: training, memory, and writes in place. Each needs torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from colocate import Concat, First, PerRank, Role, method
from colocate.testing.gate import pass_gate_async
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch
else:
    torch = import_optional("torch")


def changes_weights(model: Any, optimizer: Any) -> bool:
    """Return whether an optimizer's step changes a model's weights."""
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer.zero_grad()
    model(torch.ones(1, 2, device=before[0].device)).sum().backward()
    optimizer.step()
    return not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


class Trainer(Role):
    """A role that trains or makes a model with its optimizer."""

    def __init__(self, model: Any = None, optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer

    @method(collect=First())
    def step(self) -> bool:
        return changes_weights(self.model, self.optimizer)

    @method(collect=First())
    def step_with(self, model: Any, optimizer: Any) -> bool:
        """Step a model with an optimizer, or with the optimizer that a function makes."""
        return changes_weights(model, optimizer() if callable(optimizer) else optimizer)

    @method(collect=First())
    def step_with_both(self, both: Any) -> bool:
        return changes_weights(*both)

    @method(collect=First())
    def make(self, listed: bool = False) -> Any:
        """Return a model with its optimizer, or with a list of its parameters."""
        model = torch.nn.Linear(2, 2)
        return model, list(model.parameters()) if listed else torch.optim.SGD(model.parameters(), lr=1.0)


def _write_by_operators(value: Any) -> None:
    value["x"].add_(1.0)


def _write_by_data(value: Any) -> None:
    value["x"].data[0] = 7.0


def _replace_data(value: Any) -> None:
    value["x"].data = torch.full((3,), 7.0)


def _write_by_numpy(value: Any) -> None:
    value["x"].numpy()[...] = 7.0


def _write_by_view(value: Any) -> None:
    value["x"].detach().view(3, 1).numpy()[1, 0] = 7.0


def _write_integer_tensor(value: Any) -> None:
    value["pair"][0].data.zero_()


def _write_array(value: Any) -> None:
    value["pair"][1][...] = 7


def _write_array_view(value: Any) -> None:
    value["pair"][1].reshape(4)[3] = 7


def _write_deep(value: Any) -> None:
    value["deep"]["list"][1][0].numpy()[0] = 7.0


def _replace_item(value: Any) -> None:
    value["deep"]["list"].append(1)


def _replace_key(value: Any) -> None:
    value["deep"]["name"] = "changed"


WRITES: Mapping[str, Callable[[Any], None]] = {
    "operators": _write_by_operators,
    "data": _write_by_data,
    "other data": _replace_data,
    "numpy": _write_by_numpy,
    "a view": _write_by_view,
    "an integer tensor": _write_integer_tensor,
    "an array": _write_array,
    "a view of an array": _write_array_view,
    "deep inside": _write_deep,
    "another item": _replace_item,
    "another key": _replace_key,
}


class Mourned(Role):
    """A role that makes values, uses values in every way, and counts the values still alive."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[torch.Tensor]] = []

    @method(collect=Concat())
    def make(self) -> torch.Tensor:
        tensor = torch.arange(4.0)
        self.refs.append(weakref.ref(tensor))
        return tensor

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
        """Return the number of made values that are still alive."""
        gc.collect()
        return sum(ref() is not None for ref in self.refs)


class Writer(Role):
    """A role that makes a nested value, and writes into values."""

    def __init__(self) -> None:
        self.returned: Any = None
        self.held: Any = None

    @method(collect=First())
    def nested(self) -> dict[str, Any]:
        """Return tensors and arrays in dicts, tuples and lists."""
        import numpy

        self.returned = {
            "x": torch.arange(3.0),
            "pair": (torch.arange(2, 4), numpy.arange(4).reshape(2, 2)),
            "deep": {"name": "as it was", "list": [1, (torch.ones(2),)]},
        }
        value: dict[str, Any] = self.returned
        return value

    @method
    def hold(self, value: Any) -> None:
        self.held = value

    @method
    def write(self, value: Any, how: str) -> None:
        WRITES[how](value)

    @method(dispatch=PerRank("gate"), concurrency=2)
    async def write_later(self, value: Any, how: str | None, gate: Any) -> None:
        """Write on ranks with a gate once the gate is open, if `how` says so; two calls may overlap."""
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

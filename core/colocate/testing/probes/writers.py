"""A role that writes where no method may, in every way in which a value can be written into. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from colocate import First, PerRank, Role, method
from colocate.testing.gate import pass_gate_async


def _through_operators(value: Any) -> None:
    value["x"].add_(1.0)


def _through_data(value: Any) -> None:
    value["x"].data[0] = 7.0


def _other_data(value: Any) -> None:
    import torch

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


class Writer(Role):
    """Makes a nested value, and changes it."""

    def __init__(self) -> None:
        self.returned: Any = None
        self.held: Any = None

    @method(collect=First())
    def nested(self) -> dict[str, Any]:
        """Tensors and arrays in dicts, tuples and lists."""
        import numpy
        import torch

        self.returned = {
            "x": torch.arange(3.0),
            "pair": (torch.arange(2, 4), numpy.arange(4).reshape(2, 2)),
            "deep": {"name": "as it was", "list": [1, (torch.ones(2),)]},
        }
        made: dict[str, Any] = self.returned
        return made

    @method
    def hold(self, value: Any) -> None:
        """Remember an argument."""
        self.held = value

    @method
    def write(self, value: Any, how: str) -> None:
        """What no method may do: change its argument."""
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
        """Nor an argument of an earlier call."""
        WRITES[how](self.held)

    @method
    def write_returned(self, how: str) -> None:
        """Nor what it has returned."""
        WRITES[how](self.returned)

    @method
    def untouched(self) -> float:
        """Nothing is wrong here."""
        return 1.0

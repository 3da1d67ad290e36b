"""Arguments arrive on the slot's device, in whatever kind of value the tensors are."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import attrs
import numpy
import pytest

from colocate import Role, method
from colocate._values.leaving import place_arguments
from colocate.errors import DispatchError

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")


@attrs.frozen
class Sample:
    tensor: Any


@dataclasses.dataclass
class Node:
    tensor: Any
    parent: Any = None


def where(value: Any) -> Any:
    """Return the devices of a value's tensors, in the structure of the value."""
    if isinstance(value, numpy.ndarray):
        return "none"
    if isinstance(value, torch.Tensor):
        return str(value.device)
    if isinstance(value, torch.nn.Module):
        return sorted({str(item.device) for item in [*value.parameters(), *value.buffers()]})
    if isinstance(value, (dict, UserDict)):
        return {key: where(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [where(item) for item in value]
    if isinstance(value, (Sample, Node)):
        return where(value.tensor)
    if isinstance(value, tensordict.TensorDictBase):
        return {key: where(item) for key, item in value.items()}
    return value


def on(device: str, value: Any, host: bool = False) -> Any:
    return place_arguments({"x": value}, device, ("x",) if host else ())["x"]


def test_loops() -> None:
    """A record in a reference cycle is moved as a cycle; the original stays as it is."""
    node = Node(torch.nn.Linear(1, 1))
    node.parent = [Node(torch.ones(1), node)]
    moved = on("meta", node)
    assert (where(moved), where(moved.parent)) == (["meta"], ["meta"])
    assert moved.parent[0].parent is moved
    assert where([node, node.parent]) == [["cpu"], ["cpu"]]
    assert node.parent[0].parent is node


def test_a_record_that_refuses_to_be_copied() -> None:
    """A record that can't be copied is refused with a remedy; on its target device it isn't copied at all."""

    @dataclasses.dataclass
    class Refusing(Exception):
        tensor: Any

        def __copy__(self) -> Any:
            raise ValueError("one is enough")

    value = Refusing(torch.ones(1))
    with pytest.raises(DispatchError, match=r"Refusing with tensors .* on meta, .*\(ValueError: one is enough\): give"):
        on("meta", [value])
    assert where(value.tensor) == "cpu"
    assert on("cpu", value) is value


def test_a_string_is_not_taken_letter_by_letter() -> None:
    """A string as `host` is refused even if its letters are parameters, and so is a name that isn't a parameter."""
    with pytest.raises(DispatchError, match="host names 'length', but its parameters are lengths"):

        class Unknown(Role):
            @method(host=("length",))
            def forward(self, lengths: Any) -> None: ...

    with pytest.raises(DispatchError, match=r"host='xy' is a string; write host=\('xy',\)"):

        class Wrong(Role):
            @method(host="xy")
            def forward(self, x: Any, y: Any, xy: Any) -> None: ...


def test_an_unknown_option_is_named() -> None:
    """An option that `@method` doesn't have is refused by name, when the class is declared."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'readonly'"):

        class Unknown(Role):
            @method(readonly=("x",))  # type: ignore[call-overload, untyped-decorator]
            def forward(self, x: Any) -> None: ...

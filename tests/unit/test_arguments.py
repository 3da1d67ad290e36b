"""Arguments arrive on the slot's device, and results leave it as ordinary ones, whatever has the tensors."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any

import attrs
import numpy
import pytest

from colocate import Role, method
from colocate._values.leaving import ordinary, placed
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
    """The devices in a value."""
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
    return placed({"x": value}, device, ("x",) if host else ())["x"]


KINDS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "nested": (lambda t: {"a": [t, (t, 1)], "b": None}, {"a": ["meta", ["meta", 1]], "b": None}),
    "attrs": (lambda t: Sample([Sample(t)]), ["meta"]),
    "UserDict": (lambda t: UserDict(ids=t, n=1), {"ids": "meta", "n": 1}),
    "sparse": (lambda t: t.to_sparse(), "meta"),
    "jagged": (lambda t: torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged), "meta"),
    "TensorDict": (lambda t: tensordict.TensorDict({"a": t, "b": {"c": t}}, [3]), {"a": "meta", "b": {"c": "meta"}}),
    "TensorDict of a device": (lambda t: tensordict.TensorDict({"a": t}, [3], device="cpu"), {"a": "meta"}),
    "array": (lambda t: [t.numpy(), t], ["none", "meta"]),
    "expanded": (lambda t: torch.zeros(1).expand(100_000_000), "meta"),
    "module": (lambda t: torch.nn.BatchNorm1d(2), ["meta"]),
}


@pytest.mark.parametrize(("make", "expected"), KINDS.values(), ids=KINDS)
def test_everything_arrives(make: Callable[[Any], Any], expected: Any) -> None:
    """Values of kinds that the executor suite hasn't; the value that was given stays as it is."""
    value = make(torch.ones(3, 2))
    before = where(value)
    moved = on("meta", value)
    assert where(moved) == expected
    assert type(moved) is type(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        assert moved.stride() == value.stride()
    assert where(value) == before
    assert on("cpu", value) is value
    assert on("meta", value, host=True) is value


def test_two_names_of_one_tensor() -> None:
    """They stay two names of one, also of a module's weights."""
    x = torch.ones(2)
    moved = on("meta", [x, {"again": x}, Sample(x)])
    assert moved[0] is moved[1]["again"] is moved[2].tensor
    tied = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)])
    tied[1].weight = tied[0].weight
    tied[0].weight.requires_grad_(False)
    one, two = on("meta", tied)
    assert one.weight is two.weight
    assert isinstance(one.weight, torch.nn.Parameter)
    assert not one.weight.requires_grad


def test_optimizers_have_the_parameters_of_what_was_moved() -> None:
    """They and schedulers; what they have of state is there too. The ones that were given stay as they are."""
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.weight = model.weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    moved, given, there, again = on("meta", [scheduler, optimizer, model, Node(other)])
    assert moved.optimizer is given
    for index, weight in enumerate((there.weight, there.bias)):
        assert weight is given.param_groups[0]["params"][index]
        assert (type(weight), where(weight), weight.requires_grad) == (torch.nn.Parameter, "meta", True)
        assert where(given.state[weight]["exp_avg"]) == "meta"
    assert again.tensor.weight is there.weight
    assert where([model, optimizer.state[model.bias]["exp_avg"]]) == [["cpu"], "cpu"]


def test_loops() -> None:
    """A record that comes back to itself does so where it arrives; the one that was given stays as it is."""
    node = Node(torch.nn.Linear(1, 1))
    node.parent = [Node(torch.ones(1), node)]
    moved = on("meta", node)
    assert (where(moved), where(moved.parent)) == (["meta"], ["meta"])
    assert moved.parent[0].parent is moved
    assert where([node, node.parent]) == [["cpu"], ["cpu"]]
    assert node.parent[0].parent is node


def test_a_record_that_refuses_to_be_copied() -> None:
    """It says why it can't go there, and what to give instead; where it is already nothing is copied."""

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


def test_results_in_records() -> None:
    """They leave as what they hold does, detached; the role's own stays as it is, and so does what needs no change."""
    weight = torch.ones(2, requires_grad=True)
    node, plain = Node(weight * 2), Sample(torch.ones(2))
    node.parent = [Sample(weight), node]
    found, same = ordinary([node, plain])
    assert not found.tensor.requires_grad
    assert not found.parent[0].tensor.requires_grad
    assert found.parent[1] is found
    assert node.tensor.requires_grad
    assert node.parent[0].tensor is weight
    assert same is plain


def test_a_string_is_not_taken_letter_by_letter() -> None:
    """A string is refused, with what to write; also where its letters are parameters. So is what is no parameter."""
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

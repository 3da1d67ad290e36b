"""Arguments arrive on the slot's device. GPUs are played."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any

import attrs
import numpy
import pytest

import colocate
from colocate import Concat, Role, method
from colocate._values.leaving import placed
from colocate.errors import DispatchError

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")

from tests.unit.played import ones, play  # noqa: E402


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    tokens: Any
    texts: list[str]


@attrs.frozen
class Sample:
    tokens: Any
    inner: Any = None


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
    if isinstance(value, (Batch, Sample, Node)):
        return where(value.tensor if isinstance(value, Node) else value.tokens)
    if isinstance(value, tensordict.TensorDictBase):
        return {key: where(item) for key, item in value.items()}
    return value


def on(device: str, value: Any, host: bool = False) -> Any:
    return placed({"x": value}, device, ("x",) if host else ())["x"]


KINDS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "tensor": (lambda t: t, "meta"),
    "nested": (lambda t: {"a": [t, (t, 1)], "b": None}, {"a": ["meta", ["meta", 1]], "b": None}),
    "dataclass": (lambda t: Batch(t, ["text"]), "meta"),
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
    """Values of every kind, in what they are nested in; the value that was given stays as it is."""
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


def test_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """From one to another, to the host and back; what is there already is the very object, whatever holds it."""
    play(monkeypatch)
    for source, target in (("cuda:0", "cuda:1"), ("cuda:1", "cpu"), ("cpu", "cuda:0")):
        value = {"a": ones(source), "b": Batch(ones(source), []), "c": tensordict.TensorDict({"d": ones(source)}, [3])}
        moved = on(target, value)
        assert where(moved) == {"a": target, "b": target, "c": {"d": target}}
        assert on(target, moved) is moved
        assert on("cuda:7", value, host=True)["a"].is_cpu


def test_two_names_of_one_tensor() -> None:
    """They stay two names of one, also of a module's weights."""
    x = torch.ones(2)
    moved = on("meta", [x, {"again": x}, Batch(x, [])])
    assert moved[0] is moved[1]["again"] is moved[2].tokens
    tied = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)])
    tied[1].weight = tied[0].weight
    tied[0].weight.requires_grad_(False)
    one, two = on("meta", tied)
    assert one.weight is two.weight
    assert isinstance(one.weight, torch.nn.Parameter)
    assert not one.weight.requires_grad


def test_optimizers_have_the_parameters_of_what_was_moved() -> None:
    """They, schedulers and lists; what they have of state is there too. The ones that were given stay as they are."""
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.weight = model.weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    moved, given, there, listed, again = on("meta", [scheduler, optimizer, model, [*model.parameters()], Node(other)])
    assert moved.optimizer is given
    for index, weight in enumerate((there.weight, there.bias)):
        assert weight is listed[index] is given.param_groups[0]["params"][index]
        assert (type(weight), where(weight), weight.requires_grad) == (torch.nn.Parameter, "meta", True)
        assert where(given.state[weight]["exp_avg"]) == "meta"
    assert again.tensor.weight is there.weight
    assert where([model, optimizer.state[model.bias]["exp_avg"], scheduler.optimizer.param_groups[0]["params"]]) == [
        ["cpu"],
        "cpu",
        ["cpu", "cpu"],
    ]
    lazy = on("meta", torch.nn.LazyLinear(2))
    assert where(lazy) == ["meta"]
    assert type(lazy) is torch.nn.LazyLinear


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


@pytest.mark.parametrize("option", ["host", "readonly"])
def test_a_string_is_not_taken_letter_by_letter(option: str) -> None:
    """It is refused, with what to write; also where its letters are parameters. So is what is no parameter."""
    with pytest.raises(DispatchError, match=f"{option} names 'length', but its parameters are lengths"):

        class Unknown(Role):
            @method(**{option: ("length",)})  # type: ignore[call-overload, untyped-decorator]
            def forward(self, lengths: Any) -> None: ...

    with pytest.raises(DispatchError, match=rf"{option}='xy' is a string; write {option}=\('xy',\)"):

        class Wrong(Role):
            @method(**{option: "xy"})  # type: ignore[call-overload, untyped-decorator]
            def forward(self, x: Any, y: Any, xy: Any) -> None: ...


class Tabled(Role):
    """Makes TensorDicts on its device."""

    @method(collect=Concat())
    def make(self, said: bool) -> Any:
        table = tensordict.TensorDict({"a": ones(str(self.ctx.device))}, [3])
        if said:
            table._device = self.ctx.device  # as with device=, which would have CUDA asked
        return table

    @method
    def seen(self, x: Any) -> Any:
        return where(x)


@pytest.mark.parametrize("said", [False, True])
def test_tables_of_several_devices(monkeypatch: pytest.MonkeyPatch, said: bool) -> None:
    """Parts of several GPUs are joined where the first one is, for the driver and for a role."""
    play(monkeypatch)
    with colocate.connect("local", gpus=2) as runtime:
        table = runtime.reserve(2, gpus=1).spawn({"table": colocate.role(Tabled)}).role("table", Tabled)
        assert where(table.make(said)) == {"a": "cuda:0"}
        with table.make.keep(said) as kept:
            assert kept.fetch().shape == (6,)
            assert table.seen(kept.ref) == [{"a": "cuda:0"}, {"a": "cuda:1"}]

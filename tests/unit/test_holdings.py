"""What a role holds is found, each piece of memory once, and by what it is for."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, UserDict, deque
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.utils.weak import WeakTensorKeyDictionary

from colocate._protocol.ledger import Purpose
from colocate.worker.memory import holdings
from colocate.worker.memory.holdings import held_by
from colocate.worker.memory.ledger import _shares
from colocate.worker.memory.storages import Objects, Storages

FLOAT = 4


def counted(instance: object, declared: tuple[Any, ...] = (), apart: tuple[object, ...] = ()) -> dict[str, int]:
    """Bytes by kind, each storage once."""
    found, complete = held_by(instance, declared, apart)
    assert complete
    owned, shared = _shares({"it": found}, ())
    assert shared == {"it": 0}
    assert {device for _, device in owned["it"]} <= {"cpu"}
    return {kind: size for (kind, _), size in owned["it"].items()}


def sizes(value: Any) -> list[int]:
    """The sizes of the storages of a value."""
    found = Storages()
    found.add(value)
    return [size for pieces in found.values() for size in pieces.values()]


class Holder:
    """Has what it is given."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self) -> None:
        """It has one."""


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after a step of Adam; its gradients are there."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def bytes_of(tensors: Any) -> int:
    """What torch says that tensors take."""
    return sum(each.numel() * each.element_size() for each in tensors)


@pytest.mark.parametrize("deep", [False, True])
def test_a_model_and_its_optimizer(deep: bool) -> None:
    """By kinds, as torch itself counts them; also where a role has them in an object of its own."""
    model, optimizer = trained()
    holder = Holder(learner=Holder(parts=[{"net": model}, (optimizer,)])) if deep else Holder(net=model, opt=optimizer)
    parameters = list(model.parameters())
    state = [value for each in optimizer.state.values() for value in each.values()]
    assert counted(holder) == {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of(each.grad for each in parameters),
        "optimizer": bytes_of(state),
        "buffers": bytes_of(model.buffers()),
    }


def test_an_optimizer_alone() -> None:
    """It is what holds the weights then."""
    model, optimizer = trained()
    assert counted(Holder(opt=optimizer))["parameters"] == bytes_of(model.parameters())


class Moments:
    """An optimizer's state may be an object."""

    def __init__(self, like: torch.Tensor) -> None:
        self.first = torch.zeros_like(like)


def test_state_in_objects() -> None:
    """It is the optimizer's, also if the role has it elsewhere."""
    model = nn.Linear(8, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    state = Moments(model.weight)
    optimizer.state[model.weight]["moments"] = state
    optimizer.state[model.weight]["last"] = deque([torch.zeros(3)])
    optimizer.param_groups[0]["scale"] = Moments(torch.zeros(5))
    for more in ({}, {"flat": [state.first]}):
        assert counted(Holder(net=model, optimizer=optimizer, **more)) == {
            "parameters": 8 * 16 * FLOAT,
            "optimizer": (8 * 16 + 3 + 5) * FLOAT,
        }


class Accelerated(torch.optim.Optimizer):
    """Asks the one that it wraps, by code of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        """That one's."""
        raise AssertionError("nobody's code is called")

    state = param_groups


def test_an_optimizer_that_wraps_another() -> None:
    """That one's state is found."""
    model, optimizer = trained()
    assert counted(Holder(net=model, optimizer=Accelerated(optimizer))) == counted(
        Holder(net=model, optimizer=optimizer)
    )


def test_objects_of_torch() -> None:
    """What they have besides is what the optimizer's state, or a module's buffers, would be."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    assert counted(Holder(scaler=scaler)) == {"optimizer": 2 * FLOAT}  # and when it has last grown
    data = torch.utils.data.TensorDataset(torch.ones(6), torch.ones(6, 2))
    normal = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    assert counted(Holder(loader=loader, prior=[normal])) == {"buffers": (6 + 12 + 3 + 3) * FLOAT}
    points = torch.quasirandom.SobolEngine(3)
    assert set(counted(Holder(points=points))) == {"buffers"}
    hook = PowerSGDState(None, 2)
    hook.error_dict[0] = torch.ones(5)
    assert counted(Holder(hook=hook)) == {"optimizer": 5 * FLOAT}
    model, optimizer = trained()
    alone = counted(Holder(model=model, optimizer=optimizer))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    assert counted(Holder(model=model, optimizer=optimizer, schedule=schedule)) == alone


def test_memory_that_is_shared() -> None:
    """Tied weights, views, a second name, an array over a tensor: each byte once, as the first of its kinds."""
    tied = nn.Linear(32, 32, bias=False)
    model = nn.Sequential(tied, nn.Linear(32, 32, bias=False))
    model[1].weight = tied.weight
    whole = torch.zeros(100)
    holder = Holder(model=model, again=tied, part=tied.weight[2:5], halves=whole.split(50), array=whole.numpy()[:3])
    assert counted(holder) == {"parameters": 32 * 32 * FLOAT, "tensors": 100 * FLOAT}


def test_an_array_over_part_of_a_tensor() -> None:
    """Begins elsewhere, and is the tensor's memory all the same."""
    whole = torch.zeros(100)
    assert counted(Holder(whole=whole, part=whole[10:].numpy())) == {"tensors": 100 * FLOAT}
    assert counted(Holder(part=whole[10:].numpy()[5:])) == {"tensors": 100 * FLOAT}


@pytest.mark.parametrize("order", [1, -1])
def test_tensors_of_parts_of_an_array(order: int) -> None:
    """Begin where it does, or elsewhere, and have storages of their own; each byte counts once, whatever is first."""
    array = np.zeros(100, dtype=np.float32)
    parts = [
        array,
        *(torch.from_numpy(array[some]) for some in (slice(0, 0), slice(10), slice(10, 60), slice(50, 100))),
    ]
    assert counted(Holder(parts=parts[::order])) == {"tensors": 100 * FLOAT}
    assert counted(Holder(net=nn.ParameterList(parts[2:4]), all=parts)) == {"parameters": 100 * FLOAT}
    found, _ = held_by(Holder(parts=parts[1:3][::order]))
    assert [*found[Purpose.TENSORS]["cpu"].values()] == [10 * FLOAT]


class Replay:
    """Knows its size, and is neither tensor nor array."""

    def __init__(self) -> None:
        self.observations = torch.zeros(10)

    @property
    def nbytes(self) -> int:
        return 40


def test_what_has_a_size_and_tensors() -> None:
    """It is looked into as anything else, the role itself too."""
    assert counted(Holder(replay=Replay())) == {"tensors": 10 * FLOAT}
    assert counted(Replay()) == {"tensors": 10 * FLOAT}


def test_a_view_keeps_all_of_its_memory() -> None:
    assert counted(Holder(row=torch.zeros(1000, 10)[3])) == {"tensors": 1000 * 10 * FLOAT}
    assert counted(Holder(row=np.zeros((1000, 10), np.float32)[3])) == {"tensors": 1000 * 10 * FLOAT}


def test_strides_of_its_own() -> None:
    """A view counts as what it is a view of, however often it shows that; else as far as its strides reach."""
    array = np.zeros(1000, np.float32)
    windows = np.lib.stride_tricks.sliding_window_view
    for view in (windows(array, 50), windows(array[::-1], 50)[3:], windows(array, 50).T[::-1]):
        assert counted(Holder(view=view)) == {"tensors": 1000 * FLOAT}
        assert counted(Holder(view=view, array=array[7:])) == {"tensors": 1000 * FLOAT}
    memory = bytearray(1000 * FLOAT)
    view = np.ndarray((100, 100), np.float32, memory, offset=200 * FLOAT, strides=(-FLOAT, FLOAT))
    assert counted(Holder(view=view)) == {"tensors": 199 * FLOAT}


@attrs.define
class Slotted:
    inside: Any


class Private:
    """Has slots of its own and those of a base, one of them under the same name."""

    __slots__ = ("__hidden", "named")

    def __init__(self) -> None:
        self.__hidden, self.named = torch.zeros(1), torch.zeros(1)


class Derived(Private):
    __slots__ = ("named",)

    def __init__(self) -> None:
        super().__init__()
        Private.named.__set__(self, torch.zeros(1))  # type: ignore[attr-defined]


class Listed(list[Any]):
    """A list with an attribute."""


def test_where_it_is_found() -> None:
    """In containers, attributes, slots and modules' own attributes; a circle has an end."""
    module = nn.Module()
    module.cache = torch.zeros(1)
    circle: list[Any] = [torch.zeros(1)]
    circle.append(circle)
    places = Holder(
        in_dict={"x": torch.zeros(1)},
        in_ordered=OrderedDict(x=torch.zeros(1)),
        in_deque=deque([torch.zeros(1)]),
        in_slots=Slotted(Slotted(torch.zeros(1))),
        in_private=Derived(),
        in_list=Listed([torch.zeros(1)]),
        in_module=module,
        in_circle=circle,
        array=np.zeros(1, np.float32),
        in_proxy=types.MappingProxyType({"x": torch.zeros(1)}),
        in_array=np.array([torch.zeros(1), None, "x"], dtype=object),
        in_bound=Holder(x=torch.zeros(1)).method,
    )
    assert counted(places) == {"tensors": 14 * FLOAT + places.in_array.nbytes}


def test_attributes_of_tensors() -> None:
    """They may lead to others. Megatron has gradients there. None is given any."""
    net, optimizer = trained()
    plain = counted(Holder(net=net, optimizer=optimizer))
    weight = next(net.parameters())
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float64)  # type: ignore[attr-defined]
    loose = torch.zeros(1)
    loose.beside = [torch.zeros(1)]  # type: ignore[attr-defined]
    found = counted(Holder(net=net, optimizer=optimizer, loose=loose))
    assert found == {**plain, "gradients": plain["gradients"] + 2 * weight.nbytes, "tensors": 2 * FLOAT}
    assert len([each for each in gc.get_referents(*net.parameters()) if type(each) is dict]) == 1


def test_what_is_not_looked_into() -> None:
    """Another role, a class, a thread's lock, what nobody holds but a weak reference, what a property would make."""

    class Asked(Holder):
        shared = torch.zeros(1)

        @property
        def made(self) -> torch.Tensor:
            raise AssertionError("asked")

    other = Holder(weights=torch.zeros(10))
    assert counted(Asked(other=other, kind=Asked, lock=threading.Lock()), apart=(other,)) == {}


def test_declared() -> None:
    """What a role says that it holds besides."""
    cache = torch.zeros(10)
    assert counted(Holder(), declared=([{"cache": cache}],)) == {"declared": 10 * FLOAT}
    assert counted(Holder(seen=cache), declared=(cache,)) == {"declared": 10 * FLOAT}


def test_tensors_without_memory_of_their_own() -> None:
    """On the meta device, of no elements; of others: sparse ones, jagged ones."""
    sparse = torch.eye(4).to_sparse()
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    assert sizes([torch.empty(9, device="meta"), torch.empty(0)]) == []
    assert sum(sizes(sparse)) == 4 * FLOAT + 2 * 4 * 8
    assert sum(sizes(jagged)) >= 5 * FLOAT


class Wrapping(torch.Tensor):
    """Has its values in an attribute, and says so nowhere."""

    values_: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Wrapping:
        made: Wrapping = torch.Tensor._make_wrapper_subclass(cls, values.size())  # type: ignore[attr-defined]
        made.values_ = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("asked")


def test_tensors_that_have_no_storage() -> None:
    """Such as aren't made yet, are there for tracing, or have their values in tensors of their own."""
    with FakeTensorMode():
        fake = torch.zeros(10)
    seen: list[torch.Tensor] = []
    torch.func.vmap(lambda row: (seen.append(row), row)[1])(torch.zeros(2, 3))
    torch.func.grad(lambda row: (seen.append(row), row.sum())[1])(torch.zeros(3))
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    nothing = [fake, *seen, torch._to_functional_tensor(torch.zeros(3)), torch.zeros(3, 3).to_mkldnn()]
    assert sizes([*nothing, *lazy.parameters()]) == []
    assert counted(Holder(nothing=nothing, lazy=lazy)) == {"buffers": 8}  # how many batches there were
    assert counted(Holder(wrapped=Wrapping(torch.zeros(10)))) == {"tensors": 10 * FLOAT}
    objects, _ = held_by(Holder(wrapped=Wrapping(torch.zeros(10)), nothing=nothing, lazy=lazy), storages=Objects)
    assert [*objects[Purpose.TENSORS]["cpu"].values()] == [10 * FLOAT]


def test_an_exported_model() -> None:
    """What it was traced with is no memory of anybody's."""
    model = nn.Linear(30, 30)
    exported = torch.export.export(model, (example := torch.zeros(2, 30),))
    del example
    assert counted(Holder(exported=exported)) == {"parameters": bytes_of(model.parameters()), "buffers": 60 * FLOAT}


class Tabled(nn.Module):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table


def test_what_programs_are_made_with() -> None:
    """Their constants are part of them, whatever they were called in the module."""
    model = Tabled()
    assert counted(Holder(model=model)) == {"tensors": 16 * FLOAT}
    for program in (torch.export.export(model, (torch.zeros(2, 4),)).module(), torch.fx.symbolic_trace(model)):
        assert counted(Holder(program=program)).pop("buffers") == 16 * FLOAT


class Loading(dict[str, Any]):
    """Makes its values when it is asked for them."""

    def values(self) -> Any:
        raise AssertionError("asked")


def test_nobodys_code_is_called() -> None:
    """Of a dict that loads, or of what a weak reference pretends to be, which isn't there any more."""
    gone = weakref.proxy(Slotted(torch.zeros(1)))
    assert counted(Holder(loading=Loading(x=torch.zeros(3)), gone=gone, all=[gone])) == {"tensors": 3 * FLOAT}


def test_too_much_to_look_at() -> None:
    """What is near is found, and that there is more is told."""
    rows = [[Holder()] for _ in range(150_000)]
    found, complete = held_by(Holder(rows=rows, weights=torch.zeros(10)))
    assert not complete
    assert [*found[Purpose.TENSORS]["cpu"].values()] == [10 * FLOAT]
    rows = [*({"question": "x", "answer": 1.0} for _ in range(250_000)), *((n, "x") for n in range(250_000))]
    gc.collect()
    assert counted(Holder(rows=rows, weights=torch.zeros(1))) == {"tensors": 4}


def test_arrays_that_are_all_there_is() -> None:
    """The garbage collector has no eye on a dict or a tuple of them."""
    one, two, three = np.zeros(1), np.zeros(2), np.zeros(3)
    holder = Holder(all={"one": one}, pair=(two, 1.0), deep={"more": ({"three": three}, "x")}, none=({"x": 1}, 2))
    gc.collect()
    assert not gc.is_tracked(holder.all)
    assert not gc.is_tracked(holder.pair)
    assert counted(holder) == {"tensors": 6 * 8}


@pytest.mark.parametrize(("most", "found"), [(3, False), (4, True), (5, True)])
def test_as_many_as_are_looked_at(monkeypatch: pytest.MonkeyPatch, most: int, found: bool) -> None:
    """What is just so much is all of it."""
    monkeypatch.setattr(holdings, "_LOOKS", most)
    pieces, complete = held_by(Holder(first=torch.zeros(1), second=[np.zeros(2)]))
    assert complete is found
    assert len(pieces[Purpose.TENSORS]["cpu"]) == 1 + found


def test_modules_with_attributes_of_their_own() -> None:
    """Wherever they come among those that every module has, and where a class makes these never."""

    class Early(nn.Linear):
        def __init__(self) -> None:
            object.__setattr__(self, "cache", torch.zeros(3))
            super().__init__(2, 2, bias=False)

    class Never(nn.Module):
        def __init__(self) -> None:
            object.__setattr__(self, "cache", torch.zeros(5))

    late = nn.Linear(2, 2, bias=False)
    late.cache = [torch.zeros(7)]
    assert counted(Holder(all=[Early(), Never(), late])) == {"parameters": 8 * FLOAT, "tensors": 15 * FLOAT}
    many = [nn.Identity() for _ in range(250)]
    for number, module in enumerate(many):
        setattr(module, f"cache_{number}", [torch.zeros(1)])
    assert counted(Holder(all=many)) == {"tensors": 250 * FLOAT}


def test_while_it_changes() -> None:
    """Another thread goes on with it: nothing is torn, nothing raises. So it is of what objects of torch's own have."""
    holder = Holder(cache={}, items=[], net=nn.Identity(), of_torch=WeakTensorKeyDictionary())
    keys = [torch.zeros(1) for _ in range(200)]
    over = threading.Event()

    def change() -> None:
        number = 0
        while not over.is_set():
            number += 1
            holder.cache[number % 50] = [torch.zeros(1)]
            holder.cache.pop((number + 25) % 50, None)
            holder.items[:] = [torch.zeros(1)] * (number % 30)
            setattr(holder, f"x{number % 10}", number)
            setattr(holder.net, f"x{number % 30}", [torch.zeros(1)])
            holder.net.__dict__.pop(f"x{(number + 15) % 30}", None)
            holder.of_torch[keys[number % 200]] = [torch.zeros(1)]
            holder.of_torch.pop(keys[(number + 100) % 200], None)

    thread = threading.Thread(target=change)
    before = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(1e-5)
        for _ in range(300):
            held_by(holder)
    finally:
        sys.setswitchinterval(before)
        over.set()
        thread.join()


@given(st.recursive(st.integers(0, 5), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner)))
def test_all_of_it_is_found(shape: Any) -> None:
    """Whatever the nesting: as much as a copy of it adds to memory."""

    def made(part: Any) -> Any:
        if isinstance(part, int):
            return torch.zeros(part)
        if isinstance(part, dict):
            return {key: made(value) for key, value in part.items()}
        return tuple(map(made, part)) if len(part) % 2 else [*map(made, part)]

    def size(part: Any) -> int:
        if isinstance(part, int):
            return part * FLOAT
        return sum(map(size, part.values() if isinstance(part, dict) else part))

    value = made(shape)
    assert counted(Holder(value=value)).get("tensors", 0) == size(shape)
    assert counted(Holder(value=[value, copy.deepcopy(value)])).get("tensors", 0) == 2 * size(shape)


class Key(str):
    """A string of a kind of its own: dicts with such keys are made otherwise."""

    __slots__ = ()


def test_modules_whose_parameters_are_not_in_a_plain_dict() -> None:
    """Those of TorchScript have no dicts, and keys may be of other kinds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    expected = {"parameters": 28 * FLOAT, "buffers": 8 * FLOAT + 8}
    assert counted(Holder(net=scripted)) == expected
    assert counted(Holder(nets=nn.ModuleDict({Key("net"): scripted}))) == expected
    keyed = nn.Module()
    keyed.register_parameter(Key("weights"), nn.Parameter(torch.zeros(3)))
    keyed.register_buffer(Key("buffer"), torch.zeros(5))
    keyed.register_parameter("none", None)
    assert counted(Holder(net=keyed)) == {"parameters": 3 * FLOAT, "buffers": 5 * FLOAT}
    for kind in (OrderedDict, UserDict):
        keyed._parameters = kind(weights=nn.Parameter(torch.zeros(7)), none=None)  # type: ignore[assignment]
        assert counted(Holder(net=keyed)) == {"parameters": 7 * FLOAT, "buffers": 5 * FLOAT}


def test_state_of_optimizers_in_other_things_than_a_plain_dict() -> None:
    """What lies there, but no keys; by itself, or in objects."""
    model, optimizer = trained()
    before = counted(Holder(net=model, opt=optimizer))
    key, other = torch.zeros(100), next(iter(optimizer.state))
    others = {
        key: {key: torch.zeros(1), (key,): torch.zeros(2), "none": None, "number": 3},
        "by itself": torch.zeros(4),
        "listed": [torch.zeros(8)],
        "ordered": OrderedDict(value=torch.zeros(16)),
    }
    optimizer.state.update(others)  # type: ignore[call-overload]
    assert other in optimizer.state
    after = counted(Holder(net=model, opt=optimizer))
    assert after == before | {"optimizer": before["optimizer"] + 31 * FLOAT}


def test_parameters_without_a_module() -> None:
    """They are that by their type, or as an optimizer trains them, whatever is found first."""
    weights, frozen = torch.ones(8, requires_grad=True), nn.Parameter(torch.ones(4), requires_grad=False)
    weights.grad = torch.ones(8)
    holder = Holder(weights=weights, frozen=[frozen], other=torch.ones(2), optimizer=torch.optim.SGD([weights], lr=0.1))
    assert counted(holder) == {"parameters": 12 * FLOAT, "gradients": 8 * FLOAT, "tensors": 2 * FLOAT}

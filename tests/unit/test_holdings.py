"""What a role holds is found, each piece of memory once, and by what it is for."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
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
from colocate.worker.memory.holdings import Objects, held_by
from colocate.worker.memory.ledger import Gradients, _shares

FLOAT = 4


def counted(instance: object, declared: tuple[Any, ...] = (), apart: tuple[object, ...] = ()) -> dict[str, int]:
    """Bytes by kind, each storage once."""
    found, complete = held_by(instance, declared, apart)
    assert complete
    owned, shared = _shares({"it": found}, ())
    assert shared == {"it": 0}
    assert {device for _, device in owned["it"]} <= {"cpu"}
    return {kind: size for (kind, _), size in owned["it"].items()}


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


@pytest.mark.parametrize("where", ["its own", "deep", "without the model"])
def test_a_model_and_its_optimizer(where: str) -> None:
    """By kinds, as torch itself counts them; also where a role has them in an object, or only what trains them."""
    model, optimizer = trained()
    holder = {
        "its own": Holder(net=model, opt=optimizer),
        "deep": Holder(learner=Holder(parts=[{"net": model}, (optimizer,)])),
        "without the model": Holder(opt=optimizer),
    }[where]
    parameters = list(model.parameters())
    state = [value for each in optimizer.state.values() for value in each.values()]
    expected = {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of(each.grad for each in parameters),
        "optimizer": bytes_of(state),
        "buffers": bytes_of(model.buffers()),
    }
    if where == "without the model":
        del expected["buffers"]
    assert counted(holder) == expected


def test_what_optimizers_have() -> None:
    """All that lies in their state and options is that, in objects, too, also if the role has it elsewhere."""
    model = nn.Linear(8, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    state = Holder(first=torch.zeros(8, 16))
    optimizer.state[model.weight].update(moments=state, last=deque([torch.zeros(3)]), none=None)
    optimizer.state["listed"] = [torch.zeros(8)]  # type: ignore[index, assignment]
    optimizer.param_groups[0]["scale"] = Holder(scale=torch.zeros(5))
    for more in ({}, {"flat": [state.first]}):
        assert counted(Holder(net=model, optimizer=optimizer, **more)) == {
            "parameters": 8 * 16 * FLOAT,
            "optimizer": (8 * 16 + 3 + 8 + 5) * FLOAT,
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


def test_objects_of_torch() -> None:
    """What they have besides is what the optimizer's state, or a module's buffers, would be."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    hook = PowerSGDState(None, 2)
    hook.error_dict[0] = torch.ones(5)
    assert counted(Holder(scaler=scaler, hook=hook)) == {"optimizer": 7 * FLOAT}
    data = torch.utils.data.TensorDataset(torch.ones(6), torch.ones(6, 2))
    normal = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    assert counted(Holder(loader=loader, prior=[normal])) == {"buffers": (6 + 12 + 3 + 3) * FLOAT}
    model, optimizer = trained()
    alone = counted(Holder(model=model, optimizer=optimizer))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    assert counted(Holder(model=model, optimizer=Accelerated(optimizer), schedule=schedule)) == alone


def test_what_a_schedule_calls_is_no_optimizer() -> None:
    """A role that gives a scheduler one of its methods has its own tensors as before: they aren't the optimizer's."""
    model = nn.Linear(8, 16, bias=False)
    role = Holder(cache=torch.zeros(7))
    role.schedule = torch.optim.lr_scheduler.LambdaLR(  # type: ignore[attr-defined]
        torch.optim.SGD(model.parameters()), lr_lambda=Caller(role).rate
    )
    assert counted(role) == {"parameters": 8 * 16 * FLOAT, "tensors": 7 * FLOAT}


class Caller:
    """Refers to another object by a method of its own."""

    def __init__(self, other: object) -> None:
        self.other = other

    def rate(self, step: int) -> float:
        """What a scheduler asks."""
        return 1.0


def test_gradients_that_megatron_has() -> None:
    """They lie in an attribute of the parameter, and are views of a buffer that nobody may discard as a cache."""
    model, buffer = nn.Linear(8, 16, bias=False), torch.zeros(8 * 16)
    model.weight.main_grad = buffer.view(16, 8)  # type: ignore[assignment]
    assert counted(Holder(model=model, buffers=[buffer])) == {"parameters": 512, "gradients": 512}


def test_a_mapping_proxy() -> None:
    """What it stands for is looked into."""
    assert counted(Holder(table=types.MappingProxyType({"rows": torch.zeros(9)}))) == {"tensors": 9 * FLOAT}


def test_programs() -> None:
    """What a model was traced with is nobody's memory; constants are part of the program."""

    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.table

    model = Tabled()
    assert counted(Holder(model=model)) == {"tensors": 16 * FLOAT}
    for program in (torch.export.export(model, (torch.zeros(2, 4),)).module(), torch.fx.symbolic_trace(model)):
        assert counted(Holder(program=program)).pop("buffers") == 16 * FLOAT


def test_memory_that_is_shared() -> None:
    """Tied weights, views, a second name, an array over a tensor: each byte once, as the first of its kinds."""
    tied = nn.Linear(32, 32, bias=False)
    model = nn.Sequential(tied, nn.Linear(32, 32, bias=False))
    model[1].weight = tied.weight
    whole = torch.zeros(100)
    holder = Holder(model=model, again=tied, part=tied.weight[2:5], halves=whole.split(50), array=whole[10:].numpy())
    assert counted(holder) == {"parameters": 32 * 32 * FLOAT, "tensors": 100 * FLOAT}
    weights = torch.ones(8, requires_grad=True)  # trained, and in no module
    weights.grad = torch.ones(8)
    holder = Holder(weights=weights, optimizer=torch.optim.SGD([weights], lr=0.1))
    assert counted(holder) == {"parameters": 8 * FLOAT, "gradients": 8 * FLOAT}


@pytest.mark.parametrize("order", [1, -1])
def test_arrays(order: int) -> None:
    """Tensors of parts of one lie in it; a view counts whole, however often it shows that; strides go anywhere."""
    array = np.zeros(100, dtype=np.float32)
    cut = [array, *(torch.from_numpy(array[some]) for some in (slice(0, 0), slice(10), slice(10, 60), slice(50, 100)))]
    windows = np.lib.stride_tricks.sliding_window_view(array[::-1], 50)[3:]
    assert counted(Holder(parts=[*cut, windows][::order])) == {"tensors": 100 * FLOAT}
    assert counted(Holder(net=nn.ParameterList(cut[2:4]), all=cut)) == {"parameters": 100 * FLOAT}
    assert counted(Holder(row=np.zeros((1000, 10), np.float32)[3])) == {"tensors": 1000 * 10 * FLOAT}
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


class Loading(dict[str, Any]):
    """Makes its values when it is asked for them."""

    def values(self) -> Any:
        raise AssertionError("asked")


class Replay:
    """Knows its size, and is neither tensor nor array."""

    nbytes = 40

    def __init__(self) -> None:
        self.observations = torch.zeros(1)


def test_where_it_is_found() -> None:
    """In containers, attributes, slots and modules' own attributes; a circle has an end; nobody's code is called."""
    module = nn.Module()
    module.cache = torch.zeros(1)
    circle: list[Any] = [torch.zeros(1)]
    circle.append(circle)
    gone = weakref.proxy(Slotted(torch.zeros(1)))
    places = Holder(
        in_dict={"x": torch.zeros(1)},
        in_ordered=OrderedDict(x=torch.zeros(1)),
        in_deque=deque([torch.zeros(1)]),
        in_slots=Slotted(Slotted(torch.zeros(1))),
        in_private=Derived(),
        in_module=module,
        in_circle=circle,
        array=np.zeros(1, np.float32),
        in_bound=Holder(x=torch.zeros(1)).method,
        loading=Loading(x=torch.zeros(1)),
        replay=Replay(),
        gone=[gone],
    )
    assert counted(places) == {"tensors": 13 * FLOAT}
    assert counted(Replay()) == {"tensors": FLOAT}


def test_what_is_not_looked_into() -> None:
    """Another role, a class, a thread's lock, what a property would make."""

    class Asked(Holder):
        shared = torch.zeros(1)

        @property
        def made(self) -> torch.Tensor:
            raise AssertionError("asked")

    other = Holder(weights=torch.zeros(10))
    asked = Asked(other=other, kind=Asked, lock=threading.Lock())
    assert counted(asked, apart=(other,)) == {}
    assert holdings.search(asked, apart=[other]).met
    assert not holdings.search(asked, apart=[Holder()]).met


def test_declared() -> None:
    """What a role says that it holds besides."""
    cache = torch.zeros(10)
    assert counted(Holder(), declared=([{"cache": cache}],)) == {"declared": 10 * FLOAT}
    assert counted(Holder(seen=cache), declared=(cache,)) == {"declared": 10 * FLOAT}


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


def test_tensors_without_a_storage() -> None:
    """Such as aren't made yet, are there for tracing, or have their values in tensors of their own."""
    with FakeTensorMode():
        fake = torch.zeros(10)
    seen: list[torch.Tensor] = []
    torch.func.vmap(lambda row: (seen.append(row), row)[1])(torch.zeros(2, 3))
    torch.func.grad(lambda row: (seen.append(row), row.sum())[1])(torch.zeros(3))
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    nothing = [fake, *seen, torch.empty(9, device="meta"), torch.empty(0), torch.zeros(3, 3).to_mkldnn()]
    assert counted(Holder(nothing=nothing, lazy=lazy)) == {"buffers": 8}  # how many batches there were
    holder = Holder(wrapped=Wrapping(torch.zeros(10)), nothing=nothing, lazy=lazy)
    objects, _ = held_by(holder, storages=Objects)
    assert sum(objects[Purpose.TENSORS]["cpu"].values()) == 10 * FLOAT
    assert counted(Holder(sparse=torch.eye(4).to_sparse())) == {"tensors": 4 * FLOAT + 2 * 4 * 8}
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    assert counted(Holder(jagged=jagged))["tensors"] >= 5 * FLOAT


def test_too_much_to_look_at() -> None:
    """What is near is found, and that there is more is told. Rows of text and numbers don't count."""
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
    assert counted(holder) == {"tensors": 6 * 8}


@pytest.mark.parametrize(("most", "found"), [(3, False), (4, True), (5, True)])
def test_as_many_as_are_looked_at(monkeypatch: pytest.MonkeyPatch, most: int, found: bool) -> None:
    """What is just so much is all of it."""
    monkeypatch.setattr(holdings, "_LOOKS", most)
    pieces, complete = held_by(Holder(first=torch.zeros(1), second=[np.zeros(2)]))
    assert complete is found
    assert len(pieces[Purpose.TENSORS]["cpu"]) == 1 + found


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


def test_gradients_while_a_call_takes_long() -> None:
    """They are those of before; what was found isn't kept for it, so that the call may let go of it."""
    waiting: list[Any] = []
    role = types.SimpleNamespace(name="role", instance=Holder(weights=torch.ones(1, requires_grad=True)))
    lane = types.SimpleNamespace(do=lambda action: action())
    gradients = Gradients(types.SimpleNamespace(lane=lane, roles={"role": role}))  # type: ignore[arg-type]

    def trained(size: int) -> torch.Tensor:
        tensor = torch.ones(size, requires_grad=True)
        tensor.sum().backward()
        return tensor

    def sizes(known: Any) -> list[int]:
        return [*known["role"].get("cpu", {}).values()]

    assert sizes(gradients.of({"role": [trained(3), torch.ones(2)]})) == [12]
    lane.do = waiting.append
    found = [trained(4)]
    gone = weakref.ref(found[0])
    assert sizes(gradients.of({"role": found})) == [12]
    assert gradients.is_due
    found.clear()
    assert gone() is None
    role.instance.weights.sum().backward()
    (look,) = waiting
    look()
    assert sizes(gradients.of({"role": [trained(6)]})) == [4]  # of what the role had when the call had ended
    role.instance.weights.grad = None
    gradients.moved("role")
    gradients.moved("unknown")
    assert sizes(gradients.of({})) == []

"""Each piece of a role's memory is found once, with its purpose."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict, deque
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.weak import WeakTensorKeyDictionary

from colocate._protocol.ledger import Purpose
from colocate.features.memory.ledger import _split_shares
from colocate.worker import holdings
from colocate.worker.holdings import find_holdings

FLOAT = 4


def counted(instance: object, declared: tuple[Any, ...] = (), apart: tuple[object, ...] = ()) -> dict[str, int]:
    """Return the bytes by kind, each storage once."""
    found, complete = find_holdings(instance, declared, apart)
    assert complete
    owned, shared = _split_shares({"it": found}, ())
    assert shared == {"it": 0}
    assert {device for _, device in owned["it"]} <= {"cpu"}
    return {kind: size for (kind, _), size in owned["it"].items()}


class Holder:
    """An object with the given attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self) -> None:
        """Do nothing."""


@attrs.define
class Slotted:
    inside: Any


class Loading(dict[str, Any]):
    """A dict that makes its values on demand."""

    def values(self) -> Any:
        raise AssertionError("asked")


def test_memory_is_found_in_nested_objects() -> None:
    """Memory is found in containers, attributes, slots and cycles, without a call of users' code."""
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
        in_module=module,
        in_circle=circle,
        array=np.zeros(1, np.float32),
        in_bound=Holder(x=torch.zeros(1)).method,
        loading=Loading(x=torch.zeros(1)),
        gone=[gone],
    )
    assert counted(places) == {"tensors": 9 * FLOAT}


def test_search_skips_roles_classes_and_locks() -> None:
    """The search leaves out another role, classes, locks and properties."""

    class Asked(Holder):
        shared = torch.zeros(1)

        @property
        def made(self) -> torch.Tensor:
            raise AssertionError("asked")

    other = Holder(weights=torch.zeros(10))
    asked = Asked(other=other, kind=Asked, lock=threading.Lock())
    assert counted(asked, apart=(other,)) == {}
    assert holdings.search(asked, apart=[other]).has_met_excluded
    assert not holdings.search(asked, apart=[Holder()]).has_met_excluded


def test_tensors_without_a_storage() -> None:
    """Tensors without a storage have no bytes; sparse and jagged ones have those of their parts."""
    with FakeTensorMode():
        fake = torch.zeros(10)
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    nothing = [fake, torch.empty(9, device="meta"), torch.empty(0), torch.zeros(3, 3).to_mkldnn()]
    assert counted(Holder(nothing=nothing, lazy=lazy)) == {"buffers": 8}  # the batch counter
    assert counted(Holder(sparse=torch.eye(4).to_sparse())) == {"tensors": 4 * FLOAT + 2 * 4 * 8}
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    assert counted(Holder(jagged=jagged))["tensors"] >= 5 * FLOAT


@pytest.mark.parametrize(("most", "found"), [(3, False), (4, True), (5, True)])
def test_as_many_as_are_looked_at(monkeypatch: pytest.MonkeyPatch, most: int, found: bool) -> None:
    """The search stops after its limit and says that it is incomplete; just as many objects are a complete search."""
    monkeypatch.setattr(holdings, "_LOOKS", most)
    pieces, complete = find_holdings(Holder(first=torch.zeros(1), second=[np.zeros(2)]))
    assert complete is found
    assert len(pieces[Purpose.TENSORS]["cpu"]) == 1 + found


def test_search_tolerates_concurrent_changes() -> None:
    """A search raises nothing while another thread changes the role, even in torch's own objects."""
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
            find_holdings(holder)
    finally:
        sys.setswitchinterval(before)
        over.set()
        thread.join()

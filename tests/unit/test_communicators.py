"""What process groups have of a device's memory, where their backends tell."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from colocate import GroupMemory, RoleMemory, SlotMemory
from colocate._role import torch_books
from colocate.worker.memory import ledger

_MIB = 1 << 20


@attrs.frozen(eq=False)
class Telling:
    """A group, its own backend as those that are written in Python are: it tells what it has, or why it can't."""

    told: Any

    _device_types = ()

    def memory_stats(self) -> Any:
        """As torch's backends do."""
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


class Silent:
    """One of an older torch."""

    _device_types = ()


_UNTOLD = Telling(RuntimeError("getMemoryStats() requires NCCL 2.29.7 or later"))
_ALL = {"suspend": 6 * _MIB, "suspended": 0, "persist": _MIB, "total": 7 * _MIB}
_SUSPENDED = {"suspend": 6 * _MIB, "suspended": 1, "persist": _MIB, "total": 7 * _MIB}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], None),
        ([_UNTOLD, Silent()], None),
        ([_UNTOLD, Telling(_ALL), Telling(_ALL)], 14 * _MIB),
        ([Telling(_SUSPENDED), Telling(_ALL)], 8 * _MIB),
    ],
)
def test_how_much(groups: list[Any], expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all groups together, as far as they tell; of one that is suspended, what it keeps all the same."""
    monkeypatch.setattr(torch_books, "all_groups", lambda: dict(enumerate(groups)))
    assert torch_books.nbytes() == expected


class Gpu:
    """What torch says of a device, of which a context and communicators have 100 MiB."""

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return 800 * _MIB, 1000 * _MIB

    def memory_allocated(self, device: str) -> int:
        return 60 * _MIB

    def memory_reserved(self, device: str) -> int:
        return 100 * _MIB


@pytest.mark.parametrize("told", [True, False])
def test_who_has_it(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of its own beside the context, which has it where nobody tells."""
    monkeypatch.setattr(torch_books, "all_groups", lambda: {"policy/default": Telling(_ALL) if told else _UNTOLD})
    monkeypatch.setattr(ledger, "in_use", lambda device: Gpu())
    found = ledger._gpu("cuda:0")
    slot = SlotMemory(0, "here", "cuda:0", (), None, None, None, found)
    rest = {"other, device": 60 * _MIB, "fragmentation": 40 * _MIB}
    assert slot.unowned == rest | ({"nccl": 7 * _MIB, "context": 93 * _MIB} if told else {"context": 100 * _MIB})


def test_another_allocator_in_the_place_of_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps no such books: nothing is guessed, and what tensors don't have of the GPU counts with the context."""

    class Others(Gpu):
        def memory_allocated(self, device: str) -> int:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch_books, "all_groups", lambda: {"policy/default": Telling(_ALL)})
    monkeypatch.setattr(ledger, "in_use", lambda device: Others())
    found = ledger._gpu("cuda:0")
    assert found == {"used": 200 * _MIB, "total": 1000 * _MIB, "nccl": 7 * _MIB}
    role = RoleMemory("policy", 0, {"parameters": 80 * _MIB}, {}, 0, 0, None, complete=True)
    slot = SlotMemory(0, "here", "cuda:0", (role,), None, None, None, found)
    assert slot.unowned == {"nccl": 7 * _MIB, "context": 113 * _MIB}
    memory = GroupMemory("group", (slot,))
    assert sum(slot.unowned.values()) + role.total == found["used"]
    assert "113 MiB" in str(memory)
    assert "fragmentation" not in str(memory)
    assert '"context": 118489088' in memory.json()

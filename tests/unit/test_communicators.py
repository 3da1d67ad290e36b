"""Process groups' device memory is counted apart where their backends report it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from colocate import RoleMemory, SlotMemory
from colocate.features.memory import ledger
from colocate.features.process_groups import books
from colocate.features.process_groups.worker import GroupsOfWorker

_MIB = 1 << 20


@attrs.frozen(eq=False)
class Telling:
    """A process group with a backend in Python, which reports its memory or raises."""

    suspended: int | None

    _device_types = ()

    def memory_stats(self) -> dict[str, int]:
        if self.suspended is None:
            raise RuntimeError("getMemoryStats() requires NCCL 2.29.7 or later")
        return {"suspend": 6 * _MIB, "suspended": self.suspended, "persist": _MIB, "total": 7 * _MIB}


class Silent:
    """A process group of an older torch, which reports nothing."""

    _device_types = ()


class Gpu:
    """torch's figures for a device, of which a context and communicators have 100 MiB."""

    def __init__(self, has_books: bool) -> None:
        self.has_books = has_books

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return 800 * _MIB, 1000 * _MIB

    def memory_allocated(self, device: str) -> int:
        if not self.has_books:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")
        return 60 * _MIB

    def memory_reserved(self, device: str) -> int:
        return 100 * _MIB


@pytest.mark.parametrize(
    ("groups", "nccl"),
    [
        ([], 0),
        ([Telling(None), Silent()], 0),
        ([Telling(None), Telling(0), Telling(0)], 14),
        ([Telling(1), Telling(0)], 8),  # A suspended group keeps a part all the same.
    ],
)
@pytest.mark.parametrize("has_books", [True, False], ids=["torch's allocator", "another"])
def test_backend_memory_is_counted_beside_context(
    groups: list[Any], nccl: int, has_books: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a backend reports is counted beside the context, which has the rest.

    Without the statistics of torch's allocator nothing is guessed: the rest counts with the context.
    """
    monkeypatch.setattr(books, "list_groups", lambda: dict(enumerate(groups)))
    monkeypatch.setattr(ledger, "in_use", lambda device: Gpu(has_books))
    role = RoleMemory("policy", 0, {"parameters": 40 * _MIB}, {}, 0, 0, None, complete=True)
    part: Any = SimpleNamespace(device_bytes=partial(GroupsOfWorker.device_bytes, None))  # type: ignore[arg-type]
    slot = SlotMemory(0, "here", "cuda:0", (role,), None, None, None, ledger._read_gpu("cuda:0", parts=[part]))
    known = {"other, device": 20, "fragmentation": 40} if has_books else {}
    rest = 200 - 40 - sum(known.values()) - nccl
    expected = {**known, **({"nccl": nccl} if nccl else {}), "context": rest}
    assert slot.unowned == {name: size * _MIB for name, size in expected.items()}

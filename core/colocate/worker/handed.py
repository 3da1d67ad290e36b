"""Memory that is handed over by reference: between slots that are threads, and their driver.

Whoever got it may use it for as long as they like, so it doesn't sleep as long as they may have it: a use after that
would end the process. Nobody can ask them; but who has a tensor of their own shows in how many the memory has. What is
so far inside a value that many other things are nearer isn't noted: the page says so.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from colocate._system.imported import imported
from colocate._values.leaving import hold_nothing
from colocate.worker.memory.holdings import Objects, WeakStorage, search

_FEW = 1024
_LOOKS = 1024  # a call's arguments may be millions of things, and on threads sending them costs nothing


class Handed:
    """What was handed over in this process; used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[int, dict[int, weakref.ref[Any]]] = {}  # by what a storage is called, each once
        self._storages: dict[int, WeakStorage] = {}
        self._looks_at = _FEW

    def note(self, value: Any, device: str) -> None:
        """A value is handed over, from one slot or the driver to another one of them. `device`: a slot's of these."""
        if hold_nothing(value):  # as nearly always
            return
        holdings = search(value, most=_LOOKS).holdings(partial(Objects, device))
        with self._lock:
            for pieces in holdings.values():
                assert isinstance(pieces, Objects)
                for key, storage in pieces.storages.items():
                    known: Iterable[weakref.ref[Any]] = ()
                    if key not in self._storages or self._storages[key].expired():
                        self._storages[key] = WeakStorage(storage)
                    else:
                        known = self._tensors[key].values()
                    found = [*known, *pieces.tensors.get(key, ())]
                    self._tensors[key] = {id(each): each for each in found if each() is not None}
            if len(self._storages) > self._looks_at:
                for key in [key for key, each in self._storages.items() if each.expired()]:
                    del self._storages[key], self._tensors[key]
                self._looks_at = max(_FEW, 2 * len(self._storages))

    def is_used(self, key: int, noted: Iterable[Objects]) -> bool:
        """Whether somebody may have a storage besides those who were found to have it.

        Args:
            key: What it is called; there is a Python object of it.
            noted: What was found.
        """
        with self._lock:
            if key not in self._storages or self._storages[key].expired():
                return False
            if any(reference() is not None for reference in self._tensors[key].values()):
                return True  # perhaps only the role has it yet: it may be the very tensor
        known: dict[int, Any] = {}
        parts = 0  # of others: objects only while somebody asks for them
        for each in noted:
            for reference in each.tensors.get(key, ()):
                tensor = reference()
                if tensor is None:
                    parts += 1
                    continue
                known[id(tensor)] = tensor
                if (base := tensor._base) is not None:  # of which it is a view
                    known[id(base)] = base
        uses: int = imported("torch")._C._storage_Use_Count(key)
        return uses - 1 > len(known) + parts  # a view of what was handed over, or what autograd has saved of it


HANDED = Handed()

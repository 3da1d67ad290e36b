"""The gradients of a worker's roles, for threads that must not look at them while role code runs.

Amid `parameter.grad = None` torch lets go of Python's lock while `parameter.grad` still leads to what is being freed:
who reads it on another thread then gets a tensor without a storage, and the process a SIGSEGV.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from colocate.worker.memory.holdings import gradients_of, leaves_of
from colocate.worker.memory.site import Worker
from colocate.worker.memory.storages import Storages

# So long a look waits for the lane, where a call may take longer. Whoever looks wants to know within a second.
_WITHIN_S = 0.2


class Gradients:
    """They, as they were between two calls, or where their role's memory has moved since."""

    def __init__(self, site: Worker) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._asked = threading.Event()
        self._asked.set()
        self._leaves: Mapping[str, list[Any]] | None = None
        self._known: Mapping[str, Storages] = {}

    def of(self, leaves: Mapping[str, list[Any]]) -> Mapping[str, Storages]:
        """By role: of just now where the lane comes to it soon, else of the last time that somebody has asked.

        Args:
            leaves: The tensors that may have some, by role.
        """
        with self._lock:
            asked = self._asked
            if asked.is_set():
                asked = self._asked = threading.Event()
                self._leaves = leaves
                self._site.lane.do(partial(self._look, asked))
        asked.wait(_WITHIN_S)
        self._leaves = None  # a call that takes long may let go of them
        return self._known

    @property
    def is_due(self) -> bool:
        """Whether the lane hasn't come yet to a look."""
        return not self._asked.is_set()

    # -- on the lane

    def moved(self, role: str) -> None:
        """Memory of a role sleeps, or is there again: its gradients aren't where somebody has seen them."""
        if role in self._known:
            others = {name: pieces for name, pieces in self._known.items() if name != role}
            self._known = {**others, **_known(self._leaves_of([role]))}

    def _look(self, asked: threading.Event) -> None:
        leaves = self._leaves
        if leaves is None:
            leaves = self._leaves_of([role.name for role in self._site.roles.values() if role.name is not None])
        self._known = _known(leaves)
        asked.set()

    def _leaves_of(self, names: Iterable[str]) -> Mapping[str, list[Any]]:
        roles = {role.name: role.instance for role in self._site.roles.values() if role.name is not None}
        found: dict[str, list[Any]] = {}
        for name in names:
            with contextlib.suppress(Exception):
                found[name] = leaves_of(roles[name], [other for each, other in roles.items() if each != name])
        return found


def _known(leaves: Mapping[str, list[Any]]) -> dict[str, Storages]:
    known: dict[str, Storages] = {}
    for name, tensors in leaves.items():
        with contextlib.suppress(Exception):  # so does the look of who has asked, who tells it
            gradients = Storages()
            gradients.add_all(gradients_of(tensors))
            known[name] = gradients
    return known

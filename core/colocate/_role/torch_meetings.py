"""Whether a process group is made: decided at a store, once, and the same for all of its ranks.

In torch the ranks of a group wait for each other while they make it, and nobody can be called back from there. So they
meet before: all of them make it, or none does.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

from colocate._role.torch_groups import connect_store
from colocate._system.limits import GROUPS_CONNECT_WITHIN_S

_ALL, _NONE = b"all", b"none"
_NEVER = datetime.timedelta(days=20)  # torch counts milliseconds, in 32 bits


class Meetings:
    """Those of one worker.

    It keeps its connections: torch asks for the name of each address that it connects to, which takes seconds where
    nobody answers that.

    Attributes:
        address: Where the store listens.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        """Don't connect yet. Args: address: Where the store listens."""
        self.address = address
        self._idle: list[Any] = []

    def all_make(self, board: str, members: int) -> bool:
        """Wait until all ranks of a group are about to make it; whether they do.

        Args:
            board: What they meet under.
            members: How many they are.
        """
        decided = f"{board}/decided"
        with self._client() as store, self._client():  # the other one is for who withdraws meanwhile
            if store.add(f"{board}/there", 1) == members:
                store.compare_set(decided, "", _ALL.decode())
        with self._client() as store:
            store.wait([decided], _NEVER)
            return bool(store.get(decided) == _ALL)

    def withdraw(self, board: str) -> bool:
        """Not make a group, and so nobody does, unless all were there before; whether it is made.

        Args:
            board: What they meet under.
        """
        with contextlib.suppress(RuntimeError), self._client() as store:  # it is gone, and so is who waits there
            return bool(store.compare_set(f"{board}/decided", "", _NONE.decode()) == _ALL)
        return False

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """One that nobody else uses: it does nothing else while it waits."""
        try:
            store = self._idle.pop()
        except IndexError:
            store = connect_store(self.address, GROUPS_CONNECT_WITHIN_S)
        yield store
        self._idle.append(store)

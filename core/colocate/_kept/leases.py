"""The residents of one group as the driver knows them: which there are, who uses them, which nobody names any more."""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Iterable

from colocate._kept.kept import Kept, Lease, LeaseEnd
from colocate.errors import ColocateError


class Leases(abc.ABC):
    """Says when the parts of a resident may go: once its lease has ended and whatever uses it already has ended too."""

    def __init__(self) -> None:
        self.kept: dict[int, Kept] = {}
        self._ended: deque[int | LeaseEnd] = deque()
        self._unmade: list[int] = []  # freed in the workers, but their calls may still turn out to have failed
        self._uses: dict[int, int] = {}
        self._lock = threading.Lock()  # the innermost one: nothing is called while it is held

    def add(self, kept: Kept) -> None:
        """A call has been sent whose result is kept."""
        self.kept[kept.source.key] = kept

    def lease(self, kept: Kept) -> Lease:
        """A lease of a resident: when that ends it is released."""
        lease = Lease()
        kept.ending = LeaseEnd(lease, self._ended.append, kept.source.key)
        return lease

    def end(self, key: int) -> None:
        """Nobody names it any more."""
        self._ended.append(key)

    @property
    def news(self) -> bool:
        """Whether leases have ended since they were last taken."""
        return bool(self._ended)

    def forget(self, error: ColocateError) -> None:
        """The workers are gone, and what they have kept with them: whoever uses that is told this.

        What had failed before, and nobody has used, is still to be told.
        """
        with self._lock:
            for key, kept in list(self.kept.items()):
                kept.lost = error
                if kept.used or kept.call._error in (None, error):
                    del self.kept[key]

    def begin_use(self, kept: Kept) -> None:
        """A call or a fetch uses it from now on.

        Raises:
            ClosedError: It has been freed.
            ColocateError: Its group has failed.
        """
        with self._lock:
            if kept.freed_by is None and kept.lost is None:
                key = kept.source.key
                self._uses[key] = self._uses.get(key, 0) + 1
                return
        self.check(kept)

    @abc.abstractmethod
    def check(self, kept: Kept) -> None:
        """Raise unless it can be used."""

    def end_use(self, kept: Kept) -> None:
        """A call or a fetch uses it no longer."""
        key = kept.source.key
        with self._lock:
            left = self._uses[key] - 1
            if left:
                self._uses[key] = left
            else:
                del self._uses[key]

    def take(self) -> tuple[int, ...]:
        """What the workers may forget."""
        keys: list[int] = []
        used: list[int] = []
        with self._lock:
            while self._ended:
                ended = self._ended.popleft()
                key = ended if isinstance(ended, int) else ended.key
                (used if key in self._uses else keys).append(key)
            self._ended.extend(used)
        self._unmade = [key for key in (*self._unmade, *keys) if not self._settled(key)]
        return tuple(keys)

    def put_back(self, keys: Iterable[int]) -> None:
        """What was taken has not been told to all workers. To tell some of them again does no harm."""
        self._ended.extend(keys)

    def _settled(self, key: int) -> bool:
        """Whether the outcome of its call is known; one that has failed stays until somebody has seen that."""
        kept = self.kept.get(key)
        if kept is not None:
            if not kept.call.done():
                return False
            if not kept.untold:
                del self.kept[key]
            else:
                self.failed_unused(kept)
        return True

    @abc.abstractmethod
    def failed_unused(self, kept: Kept) -> None:
        """A kept call has failed whose resident nobody has used, nor can use any more."""

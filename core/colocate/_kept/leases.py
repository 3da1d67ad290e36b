"""The residents of one group as the driver knows them: which there are, and which nobody needs any more."""

from __future__ import annotations

import abc
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from colocate._calls.pending import OnEnd, PendingCall
from colocate._kept.kept import Hold, HoldEnd, Kept, Lease
from colocate.errors import ColocateError


class Leases(abc.ABC):
    """Says when the parts of a resident may go: once its lease has ended and whatever uses it already has ended too."""

    def __init__(self) -> None:
        self.kept: dict[int, Kept] = {}
        self._ended: deque[int | HoldEnd] = deque()
        self._told = [0]  # so many of these, from the left; another list after each `take`
        self._over: dict[int, None] = {}  # freed in the workers before their calls were over, which now are

    def add(self, kept: Kept) -> None:
        """A call has been sent whose result is kept."""
        self.kept[kept.source.key] = kept

    def forget_unsent(self, kept: Kept) -> None:
        """A call couldn't be sent, of which whoever has made it is told."""
        kept.used = True
        self.kept.pop(kept.source.key, None)

    def lease(self, kept: Kept) -> Lease:
        """The lease of a resident: once that has ended, and whatever uses it, the workers forget it."""
        hold = Hold()
        kept.ending = HoldEnd(hold, self._ended.append, kept.source.key)
        lease = Lease(hold)
        kept.lease = weakref.ref(lease)
        return lease

    @property
    def news(self) -> bool:
        """Whether there is something to take."""
        return bool(self._ended)

    def untold(self) -> tuple[tuple[int, ...], Callable[[], object]]:
        """What the workers may forget and haven't been told to, and what notes that they have been told.

        It takes no lock, and takes nothing away: that is `take`'s. What is told twice does no harm.
        """
        told = self._told
        start = told[0]
        keys = tuple([ended if isinstance(ended, int) else ended.key for ended in list(self._ended)[start:]])

        def note() -> None:
            told[0] = max(told[0], start + len(keys))  # if `take` has come meanwhile, nobody looks at this any more

        return keys, note

    def forget(self, error: ColocateError) -> None:
        """The workers are gone, and what they have kept with them: whoever uses that is told this.

        What had failed before, and nobody has used, is still to be told. The order's lock is held.
        """
        for key, kept in list(self.kept.items()):
            kept.lost = error
            if kept.used or kept.call._error in (None, error):
                del self.kept[key]

    def hold(self, kept: Kept) -> Hold:
        """Who has this keeps the value in the workers. It takes no lock and notes nothing.

        Raises:
            ClosedError: It has been freed.
            ColocateError: Its group has failed.
        """
        hold = kept.hold
        if hold is None or kept.lost is not None:
            self.check(kept)
        assert hold is not None, "what was freed is refused"
        return hold

    @abc.abstractmethod
    def check(self, kept: Kept) -> None:
        """Raise unless it can be used."""

    def take(self) -> tuple[int, ...]:
        """What the workers may forget. The order's lock is held."""
        keys: list[int] = []
        while self._ended:
            ended = self._ended.popleft()
            keys.append(ended if isinstance(ended, int) else ended.key)
        self._told = [0]
        over, self._over = self._over, {}
        for key in (*over, *keys):
            self._settle(key)
        return tuple(keys)

    def put_back(self, keys: Iterable[int]) -> None:
        """What was taken has not been told to all workers. To tell some of them again does no harm."""
        self._ended.extend(keys)

    def _settle(self, key: int) -> None:
        """It is freed: drop it once its call is over; one that has failed stays until somebody has seen that."""
        kept = self.kept.get(key)
        if kept is None:
            return
        if not kept.call.done():
            kept.call.on_end = partial(self._note_over, key, kept.call.on_end)  # no message looks at it until then
        elif not kept.untold:
            del self.kept[key]
        else:
            self.failed_unused(kept)

    def _note_over(self, key: int, then: OnEnd | None, call: PendingCall, error: BaseException | None) -> None:
        self._over[key] = None
        if then is not None:
            then(call, error)

    @abc.abstractmethod
    def failed_unused(self, kept: Kept) -> None:
        """A kept call has failed whose resident nobody has used, nor can use any more."""

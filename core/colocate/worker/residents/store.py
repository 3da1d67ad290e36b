"""Residents: results that stay in the worker, by the id of the handle on the driver."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from colocate._devices.copies import WORTH_BYTES, HostCopies
from colocate._protocol.consequence import LET_GO, Consequence, Poisoned
from colocate._protocol.uses import Written
from colocate._values import batch
from colocate._values.leaving import Watch, tensor_bytes, tensors
from colocate._values.plain import is_plain
from colocate.gpus import in_use
from colocate.worker.serving.scope import Scope


@attrs.define(eq=False)
class Entry:
    """One rank's part of a resident: pending until its call has run, then a value or a failure."""

    value: Any = None
    weight: int | None = None  # how many rows the call that made it worked on; None where nothing was scattered
    error: str | None = None
    ready: bool = False
    maker: str = ""
    watch: Watch | None = None
    lent: list[str] = attrs.field(factory=list)  # calls on other workers of this process that have the very value
    counted: int | None = None  # how many rows the value has, once that has been asked
    nbytes: int = 0  # bytes of its tensors and arrays
    # what of a device's memory in it has been brought to the host for others; None where nothing has been
    copies: HostCopies | None = None
    readers: int = 0  # how many of them are at it
    read: int = 0  # when one has begun last, as a number that grows
    takers: int = 0  # how many are still to take it, where it is forgotten when they have
    # By machine the address of who has it for others there, and how often it was given for that.
    sharers: dict[str, tuple[str, int]] = attrs.field(factory=dict)

    def rows(self, label: str) -> int:
        """How many rows the value has, counted once: nobody changes it any more."""
        if self.counted is None:
            self.counted = batch.rows(self.value, label)
        return self.counted


COPIES_BYTES = 1 << 30
"""As many of those that are on the host for others stay when they have been read."""


class Store:
    """The parts that this worker holds. The lane puts and uses them; transfer threads wait for them and read them.

    Attributes:
        strict: Whether writes in place are noticed.
        entries: The parts by the ids of their handles.
        copies_bytes: How many bytes of parts that are on a device stay on the host, too, when somebody has read them.
    """

    def __init__(self, strict: bool, scope: Scope, device: str = "cpu") -> None:
        """Make an empty one; the scope says which driver's parts are of use, and until when."""
        self.strict = strict
        self.copies_bytes = COPIES_BYTES
        self._scope = scope
        self._device = device
        self._copies_lock = threading.Lock()
        self._reads = itertools.count(1)
        self.entries: dict[int, Entry] = {}
        self._over = 1  # keys of what is offered are negative, and go down: from this one up nothing comes any more
        self._kept: set[int] = set()  # of what was offered, and is over
        self._news = threading.Condition()

    def expect(self, key: int) -> None:
        """A call is queued here whose result will be kept."""
        with self._news:
            self.entries[key] = Entry()

    def put(self, key: int, value: Any, maker: str, weight: int | None, rows: int | None = None) -> int:
        """Keep a value that a method has returned, unless it was freed before that; return its bytes.

        `weight` and `rows`: see `Entry`.
        """
        watch = None if is_plain(value) and not self.strict else Watch(value, self.strict)
        nbytes = 0 if watch is None else watch.nbytes
        with self._news:
            entry = self.entries.get(key)
            if entry is not None:
                entry.value, entry.maker, entry.watch, entry.weight = value, maker, watch, weight
                entry.counted, entry.nbytes = rows, nbytes
                entry.ready = True
                self._news.notify_all()
        return nbytes

    def fail(self, key: int, error: str) -> None:
        """Note that a value's call failed or was withdrawn, and tell whoever waits for the value."""
        with self._news:
            entry = self.entries.get(key)
            if entry is not None and not entry.ready:
                entry.error, entry.ready = error, True
                self._news.notify_all()

    def offer(self, key: int, value: Any, maker: str, takers: int) -> None:
        """Have a value be there until so many have taken it (`took`)."""
        with self._news:
            self.entries[key] = Entry(value, ready=True, maker=maker, nbytes=tensor_bytes(value), takers=takers)
            self._news.notify_all()

    def nothing_from(self, key: int) -> None:
        """Have whoever waits for what isn't offered be told: by keys from this one up nothing comes any more."""
        with self._news:
            self._over = key
            self._news.notify_all()

    def sharer(self, entry: Entry, here: tuple[str, str], lacking: int) -> tuple[str, int]:
        """Return who has a part for others of a machine, and how often that was given it.

        It is whoever asks, if it is the first there, or the same again, or if the other one was found `lacking` since
        that was given it last.
        """
        machine, address = here
        with self._news:
            sharer, times = entry.sharers.get(machine, (address, 0))
            if sharer == address or times == lacking:
                sharer, times = entry.sharers[machine] = address, times + 1
            return sharer, times

    def took(self, key: int, keeps: bool = False) -> None:
        """Somebody has taken what is offered, and perhaps keeps it."""
        with self._news:
            entry = self.entries.get(key)
            if entry is not None:
                entry.takers -= 1
                if keeps:
                    self._kept.add(key)
                if entry.takers == 0:
                    del self.entries[key]
                self._news.notify_all()

    def wait_taken(self, key: int, why_not: Callable[[], str | None]) -> bool:
        """Wait until all have taken what is offered, and return whether somebody keeps it; `why_not` as for `wait`.

        Raises:
            ColocateError: The worker is closing, or the wait was interrupted.
        """
        with self._news:
            while key in self.entries:
                if (reason := self._scope.closed or why_not()) is not None:
                    raise Consequence(reason)
                self._news.wait()
            kept = key in self._kept
            self._kept.discard(key)
            return kept

    def wait_for(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Wait until something holds that is asked again after `poke`, for so long at most; whether it does."""
        with self._news:
            return self._news.wait_for(holds, within_s)

    def free(self, keys: Iterable[int]) -> None:
        """Forget parts."""
        with self._news:
            for key in keys:
                self.entries.pop(key, None)
                self._kept.discard(key)
            self._news.notify_all()

    def local(self, key: int) -> Entry | None:
        """The part as it is, for role code on the lane; None when this worker has no such part."""
        return self.entries.get(key)

    def wait(self, key: int, why_not: Callable[[], str | None] = lambda: None) -> Entry:
        """Return the part once its call has run; `why_not`, asked again after `poke`, says why nobody is to wait.

        Raises:
            ColocateError: It failed, the worker is closing, or the wait was interrupted.
        """
        entry = self.entries.get(key)
        if entry is not None and entry.ready and entry.error is None and self._scope.closed is None:
            return entry  # as nearly always; it is noted to be ready when all else of it is there
        with self._news:
            while True:
                entry = self.entries.get(key)
                if self._scope.closed is not None:
                    raise Consequence(f"resident {key} isn't to be had any more: {self._scope.closed}")
                # A part that isn't known is on its way: it is never freed while a call that uses it is unfinished.
                if entry is not None and entry.ready:
                    if entry.error is not None:
                        raise Poisoned(entry.error)
                    return entry
                if self._over <= key < 0:
                    raise Poisoned("the sync that was to offer it is over")
                reason = LET_GO if self._scope.let_go(key) else why_not()
                if reason is not None:
                    raise Consequence(reason)
                self._news.wait()

    @contextlib.contextmanager
    def reading(self, entry: Entry) -> Iterator[None]:
        """A block in which a part, or some of its rows, is packed for somebody else.

        What of it lies on a device is copied to the host once for all who read it at the same time. It stays there for
        those who come later as long as the part does; what was read longest ago goes when it is too much.
        """
        if in_use(self._device) is None or entry.nbytes < WORTH_BYTES:
            yield
            return
        with self._copies_lock:
            copies = entry.copies or HostCopies(tensors(entry.value))
            entry.copies = copies if entry.error is None else None  # somebody has written into it since it was found
            entry.read = next(self._reads)
            entry.readers += 1
        try:
            with copies.shared():
                yield
        finally:
            with self._copies_lock:
                entry.readers -= 1
                with self._news:
                    entries = list(self.entries.values())
                kept = [(each, there.nbytes) for each in entries if (there := each.copies) is not None]
                total = sum(nbytes for _, nbytes in kept)
                for each, nbytes in sorted(kept, key=lambda item: item[0].read):
                    if total > self.copies_bytes and not each.readers:
                        total -= nbytes
                        each.copies = None

    def poke(self) -> None:
        """Let those who wait look whether they still may."""
        with self._news:
            self._news.notify_all()

    def renew(self) -> None:
        """Forget what a driver that has let go has kept."""
        with self._news:
            for key in [key for key in self.entries if self._scope.let_go(key)]:
                del self.entries[key]
            self._news.notify_all()

    def close(self) -> None:
        """Forget everything and wake whoever waits: its scope is closed."""
        with self._news:
            self.entries.clear()
            self._news.notify_all()

    def written(self, keys: Iterable[int] | None = None, by: str | None = None) -> Iterable[Written]:
        """Yield the residents (of those named, or all) that somebody has written into since they were made.

        `by`: the call that has run; None when it isn't known who it was: one that has the very value, if any.
        """
        for key in list(self.entries) if keys is None else keys:
            entry = self.entries.get(key)
            if entry is not None and entry.watch is not None and entry.watch.written():
                # Named once, with the method that did it; from then on nobody gets what it has become.
                entry.watch = None
                writer = by or next(iter(entry.lent), None)
                entry.error = (
                    f"resident {key}, returned by {entry.maker}, was changed in place"
                    f"{f' by {writer}' if writer else ''}; it can't be used any more"
                )
                entry.copies = None
                yield key, entry.maker, writer

    def values(self) -> list[tuple[str, Any]]:
        """Return who has made each part that is there, and the part; also of parts that stay on the host for others."""
        entries = [entry for entry in list(self.entries.values()) if entry.ready]
        copies = [(entry.maker, entry.copies) for entry in entries] if self.copies_bytes else []
        return [
            *((entry.maker, entry.value) for entry in entries),
            *((maker, each.tensors()) for maker, each in copies if each is not None),
        ]

    def made_by(self, role: str) -> list[int]:
        """The residents that a role has returned."""
        return [key for key, entry in list(self.entries.items()) if entry.maker.partition(".")[0] == role]

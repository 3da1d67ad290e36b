"""Residents: results that stay in the worker, by the id of the driver's handle."""

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
    """One rank's part of a resident: pending until the call has run, then a value or a failure."""

    value: Any = None
    weight: int | None = None  # number of rows that the producing call worked on; None if nothing was scattered
    error: str | None = None
    ready: bool = False
    maker: str = ""
    watch: Watch | None = None
    lent: list[str] = attrs.field(factory=list)  # calls on other workers of this process that hold the same object
    counted: int | None = None  # number of rows of the value, once counted
    nbytes: int = 0  # bytes of the value's tensors and arrays
    # host copies of device memory, made for readers on other workers; None if there are none
    copies: HostCopies | None = None
    readers: int = 0  # number of readers at present
    read: int = 0  # a growing number, set when a reader begins
    takers: int = 0  # number of takers left, for an offered part: the last one removes the part
    # By machine, the address of the worker that shares the part there, and how often a sharer was named.
    sharers: dict[str, tuple[str, int]] = attrs.field(factory=dict)

    def rows(self, label: str) -> int:
        """Return the number of rows of the value, counted once: the value is constant."""
        if self.counted is None:
            self.counted = batch.rows(self.value, label)
        return self.counted


COPIES_BYTES = 1 << 30
"""Default limit, in bytes, of host copies that stay after they were read."""


class Store:
    """Parts that this worker holds. The lane puts and uses parts; transfer threads wait for and read them.

    Attributes:
        strict: Whether writes in place are detected.
        entries: The parts by the ids of their handles.
        copies_bytes: Limit, in bytes, of host copies of parts on a device that stay after they were read.
    """

    def __init__(self, strict: bool, scope: Scope, device: str = "cpu") -> None:
        """Make an empty store; `scope` says which driver's parts are valid, and until when."""
        self.strict = strict
        self.copies_bytes = COPIES_BYTES
        self._scope = scope
        self._device = device
        self._copies_lock = threading.Lock()
        self._reads = itertools.count(1)
        self.entries: dict[int, Entry] = {}
        self._over = 1  # keys of offers are negative and count down: from this key up no offer comes any more
        self._kept: set[int] = set()  # keys of finished offers that a taker keeps
        self._news = threading.Condition()

    def expect(self, key: int) -> None:
        """Add a pending entry for a queued call whose result will be kept."""
        with self._news:
            self.entries[key] = Entry()

    def put(self, key: int, value: Any, maker: str, weight: int | None, rows: int | None = None) -> int:
        """Store a method's result, unless the resident was freed already; return the bytes.

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
        """Mark a part as failed, because its call failed or was withdrawn, and wake the waiting threads."""
        with self._news:
            entry = self.entries.get(key)
            if entry is not None and not entry.ready:
                entry.error, entry.ready = error, True
                self._news.notify_all()

    def offer(self, key: int, value: Any, maker: str, takers: int) -> None:
        """Offer a value until all takers have taken the value (`took`)."""
        with self._news:
            self.entries[key] = Entry(value, ready=True, maker=maker, nbytes=tensor_bytes(value), takers=takers)
            self._news.notify_all()

    def nothing_from(self, key: int) -> None:
        """Wake threads that wait for an offer: with keys from this one up no offer comes any more."""
        with self._news:
            self._over = key
            self._news.notify_all()

    def sharer(self, entry: Entry, here: tuple[str, str], lacking: int) -> tuple[str, int]:
        """Return the worker that shares a part on a machine, and how often a sharer was named there.

        The asking worker itself becomes the sharer if it is the first, or the same again, or if the named one was found
        `lacking` since then.
        """
        machine, address = here
        with self._news:
            sharer, times = entry.sharers.get(machine, (address, 0))
            if sharer == address or times == lacking:
                sharer, times = entry.sharers[machine] = address, times + 1
            return sharer, times

    def took(self, key: int, keeps: bool = False) -> None:
        """Count a taker of an offered part; `keeps`: the taker holds on to the value."""
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
        """Wait until all have taken an offered part; return whether a taker keeps it. `why_not` as for `wait`.

        Raises:
            ColocateError: The worker is closing, or the wait was interrupted.
        """
        with self._news:
            while key in self.entries:
                if (reason := self._scope.closed or why_not()) is not None:
                    raise Consequence(reason)
                self._news.wait()
            is_kept = key in self._kept
            self._kept.discard(key)
            return is_kept

    def wait_for(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Wait until a condition holds, checked again after `poke`, or for `within_s` seconds; return the condition."""
        with self._news:
            return self._news.wait_for(holds, within_s)

    def free(self, keys: Iterable[int]) -> None:
        """Drop parts."""
        with self._news:
            for key in keys:
                self.entries.pop(key, None)
                self._kept.discard(key)
            self._news.notify_all()

    def local(self, key: int) -> Entry | None:
        """Return a part in the present state, for role code on the lane; None when this worker has no such part."""
        return self.entries.get(key)

    def wait(self, key: int, why_not: Callable[[], str | None] = lambda: None) -> Entry:
        """Return a part once the call has run; `why_not`, checked again after `poke`, gives a reason to stop.

        Raises:
            ColocateError: The call failed, the worker is closing, or the wait was interrupted.
        """
        entry = self.entries.get(key)
        if entry is not None and entry.ready and entry.error is None and self._scope.closed is None:
            return entry  # nearly always; `ready` is set after all other fields
        with self._news:
            while True:
                entry = self.entries.get(key)
                if self._scope.closed is not None:
                    raise Consequence(f"resident {key} isn't to be had any more: {self._scope.closed}")
                # An unknown part will still arrive: no part is freed while a call that uses the part is unfinished.
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
        """Return a block for packing a part, or some of its rows, for another worker.

        Device memory is copied to the host once for all concurrent readers. The copy stays for later readers as long as
        the part does; above the limit, the copies read longest ago are dropped.
        """
        if in_use(self._device) is None or entry.nbytes < WORTH_BYTES:
            yield
            return
        with self._copies_lock:
            copies = entry.copies or HostCopies(tensors(entry.value))
            entry.copies = copies if entry.error is None else None  # a writer has changed the part since the look-up
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
                sizes = [
                    (candidate, host_copies.nbytes)
                    for candidate in entries
                    if (host_copies := candidate.copies) is not None
                ]
                total = sum(nbytes for _, nbytes in sizes)
                for candidate, nbytes in sorted(sizes, key=lambda item: item[0].read):
                    if total > self.copies_bytes and not candidate.readers:
                        total -= nbytes
                        candidate.copies = None

    def poke(self) -> None:
        """Wake the waiting threads to check their conditions again."""
        with self._news:
            self._news.notify_all()

    def renew(self) -> None:
        """Drop the residents of a driver that has released this worker."""
        with self._news:
            for key in [key for key in self.entries if self._scope.let_go(key)]:
                del self.entries[key]
            self._news.notify_all()

    def close(self) -> None:
        """Drop everything and wake the waiting threads: the scope is closed."""
        with self._news:
            self.entries.clear()
            self._news.notify_all()

    def written(self, keys: Iterable[int] | None = None, by: str | None = None) -> Iterable[Written]:
        """Yield residents (of those named, or all) that were written into since they were made.

        `by`: the call that has run; None if unknown: then a call that borrows the value, if any, is named.
        """
        for key in list(self.entries) if keys is None else keys:
            entry = self.entries.get(key)
            if entry is not None and entry.watch is not None and entry.watch.written():
                # The write is reported once, with the method; from then on the value is poisoned.
                entry.watch = None
                writer = by or next(iter(entry.lent), None)
                entry.error = (
                    f"resident {key}, returned by {entry.maker}, was changed in place"
                    f"{f' by {writer}' if writer else ''}; it can't be used any more"
                )
                entry.copies = None
                yield key, entry.maker, writer

    def values(self) -> list[tuple[str, Any]]:
        """Return producer and value of each ready part, and of each host copy."""
        entries = [entry for entry in list(self.entries.values()) if entry.ready]
        copies = [(entry.maker, entry.copies) for entry in entries] if self.copies_bytes else []
        return [
            *((entry.maker, entry.value) for entry in entries),
            *((maker, host_copies.tensors()) for maker, host_copies in copies if host_copies is not None),
        ]

    def made_by(self, role: str) -> list[int]:
        """Return the keys of residents that a role has returned."""
        return [key for key, entry in list(self.entries.items()) if entry.maker.partition(".")[0] == role]

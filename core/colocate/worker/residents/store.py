"""Stores residents, which are results that stay in the worker, under the ids of the driver's handles."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from colocate._devices.copies import WORTH_BYTES, HostCopies
from colocate._protocol.consequence import LET_GO, Consequence, PoisonedPart
from colocate._protocol.uses import ResidentWrite
from colocate._values import batch
from colocate._values.leaving import Watch, count_tensor_bytes, list_tensors
from colocate._values.plain import is_plain
from colocate.gpus import in_use
from colocate.worker.serving.scope import Scope


@attrs.define(eq=False)
class Entry:
    """One rank's part of a resident: pending until the call has run, then a value or a failure."""

    value: Any = None
    weight: int | None = None  # Number of rows that the producing call worked on; None if nothing was scattered.
    error: str | None = None
    ready: bool = False
    maker: str = ""
    watch: Watch | None = None
    # Labels of calls on other workers of this process that refer to the value.
    borrowers: list[str] = attrs.field(factory=list)
    row_count: int | None = None  # Number of rows of the value; None before the first count.
    nbytes: int = 0  # Size of the value's tensors and arrays, in bytes.
    # Host copies of device memory for readers on other workers; None if no copies exist.
    copies: HostCopies | None = None
    readers: int = 0  # Number of readers that are reading now.
    last_read: int = 0  # Serial number of the last read; copies with the lowest number are dropped first.
    # Number of takers that haven't received an offered part yet. The last taker removes the part.
    remaining_takers: int = 0
    # For each machine, the address of the worker that shares the part there, and how often a sharer was named.
    sharers: dict[str, tuple[str, int]] = attrs.field(factory=dict)

    def count_rows(self, label: str) -> int:
        """Return the number of rows of the value. The rows are counted once, because the value is constant."""
        if self.row_count is None:
            self.row_count = batch.get_row_count(self.value, label)
        return self.row_count


COPIES_BYTES = 1 << 30
"""Default limit, in bytes, of host copies that stay after they were read."""


class Store:
    """The parts of residents that this worker holds.

    The lane stores and uses parts; other threads send them to readers.

    Attributes:
        strict: Whether writes in place are detected.
        entries: The parts by the ids of their handles.
        copies_bytes: Limit, in bytes, of host copies of parts on a device that stay after they were read.
    """

    def __init__(self, strict: bool, scope: Scope, device: str = "cpu") -> None:
        """Make an empty store. `scope` says which driver's parts are valid, and until when."""
        self.strict = strict
        self.copies_bytes = COPIES_BYTES
        self._scope = scope
        self._device = device
        self._copies_lock = threading.Lock()
        self._reads = itertools.count(1)
        self.entries: dict[int, Entry] = {}
        self._end_key = 1  # Keys of offers are negative and count down. No more offers come with keys from this one up.
        self._kept_offers: set[int] = set()  # Keys of finished offers with a taker that retains the value.
        self._news = threading.Condition()

    def expect_value(self, key: int) -> None:
        """Add a pending entry for the result of a queued call."""
        with self._news:
            self.entries[key] = Entry()

    def put_value(self, key: int, value: Any, maker: str, weight: int | None, rows: int | None = None) -> int:
        """Store a method's result, unless the resident was freed already. Return the size in bytes.

        `weight` is the number of rows that the call worked on, and `rows` that of the result, if known.
        """
        watch = None if is_plain(value) and not self.strict else Watch(value, self.strict)
        nbytes = 0 if watch is None else watch.nbytes
        with self._news:
            entry = self.entries.get(key)
            if entry is not None:
                entry.value, entry.maker, entry.watch, entry.weight = value, maker, watch, weight
                entry.row_count, entry.nbytes = rows, nbytes
                entry.ready = True
                self._news.notify_all()
        return nbytes

    def fail_value(self, key: int, error: str) -> None:
        """Mark a part as failed because the call failed or was withdrawn, and wake the waiting threads."""
        with self._news:
            entry = self.entries.get(key)
            if entry is not None and not entry.ready:
                entry.error, entry.ready = error, True
                self._news.notify_all()

    def offer_value(self, key: int, value: Any, maker: str, takers: int) -> None:
        """Offer a value to other workers until all takers have confirmed the receipt (`mark_taken`)."""
        with self._news:
            self.entries[key] = Entry(
                value, ready=True, maker=maker, nbytes=count_tensor_bytes(value), remaining_takers=takers
            )
            self._news.notify_all()

    def end_offers(self, key: int) -> None:
        """Fail the waits for offers with this key or higher keys, because no such offer will come."""
        with self._news:
            self._end_key = key
            self._news.notify_all()

    def choose_sharer(self, entry: Entry, here: tuple[str, str], lacking: int) -> tuple[str, int]:
        """Return the worker that shares a part on a machine, and how often a sharer was named on that machine.

        The asking worker becomes the sharer if it is the first to ask, or is the sharer already, or has found that the
        last named sharer doesn't have the part (`lacking`).
        """
        machine, address = here
        with self._news:
            sharer, times = entry.sharers.get(machine, (address, 0))
            if sharer == address or times == lacking:
                sharer, times = entry.sharers[machine] = address, times + 1
            return sharer, times

    def mark_taken(self, key: int, keeps: bool = False) -> None:
        """Count one taker of an offered part. `keeps` says whether the taker retains the value."""
        with self._news:
            entry = self.entries.get(key)
            if entry is not None:
                entry.remaining_takers -= 1
                if keeps:
                    self._kept_offers.add(key)
                if entry.remaining_takers == 0:
                    del self.entries[key]
                self._news.notify_all()

    def wait_taken(self, key: int, why_not: Callable[[], str | None]) -> bool:
        """Wait until all takers have received an offered part, and return whether a taker retains the value.

        Raises:
            ColocateError: The worker is closing, or the wait was interrupted.
        """
        with self._news:
            while key in self.entries:
                if (reason := self._scope.closed or why_not()) is not None:
                    raise Consequence(reason)
                self._news.wait()
            is_kept = key in self._kept_offers
            self._kept_offers.discard(key)
            return is_kept

    def wait_for(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Wait at most `within_s` seconds for a condition, which `wake_waiters` causes to be checked again.

        Return the condition.
        """
        with self._news:
            return self._news.wait_for(holds, within_s)

    def free(self, keys: Iterable[int]) -> None:
        """Drop the parts with these keys."""
        with self._news:
            for key in keys:
                self.entries.pop(key, None)
                self._kept_offers.discard(key)
            self._news.notify_all()

    def find_entry(self, key: int) -> Entry | None:
        """Return a part in the present state, even if pending; None if this worker has no such part."""
        return self.entries.get(key)

    def wait_for_entry(self, key: int, why_not: Callable[[], str | None] = lambda: None) -> Entry:
        """Wait until a part's call has run, and return the part. `why_not` may return a reason to stop waiting.

        Raises:
            ColocateError: The call failed, the worker is closing, or the wait was interrupted.
        """
        entry = self.entries.get(key)
        if entry is not None and entry.ready and entry.error is None and self._scope.closed is None:
            return entry  # This is the usual case. No lock is needed, because `ready` is set after all other fields.
        with self._news:
            while True:
                entry = self.entries.get(key)
                if self._scope.closed is not None:
                    raise Consequence(f"resident {key} isn't to be had any more: {self._scope.closed}")
                # An unknown part will still arrive, because no part is freed while an unfinished call uses the part.
                if entry is not None and entry.ready:
                    if entry.error is not None:
                        raise PoisonedPart(entry.error)
                    return entry
                if self._end_key <= key < 0:
                    raise PoisonedPart("the sync that was to offer it is over")
                reason = LET_GO if self._scope.is_of_former_driver(key) else why_not()
                if reason is not None:
                    raise Consequence(reason)
                self._news.wait()

    @contextlib.contextmanager
    def reading_entry(self, entry: Entry) -> Iterator[None]:
        """Provide host copies of a part's device memory during a block that packs the part for another worker.

        All concurrent readers share one copy, which stays for later readers as long as the part does. Above the limit,
        the copies read longest ago are dropped.
        """
        if in_use(self._device) is None or entry.nbytes < WORTH_BYTES:
            yield
            return
        with self._copies_lock:
            copies = entry.copies or HostCopies(list_tensors(entry.value))
            # An error means that a writer has changed the part since the look-up.
            entry.copies = copies if entry.error is None else None
            entry.last_read = next(self._reads)
            entry.readers += 1
        try:
            with copies.share_with_thread():
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
                for candidate, nbytes in sorted(sizes, key=lambda item: item[0].last_read):
                    if total > self.copies_bytes and not candidate.readers:
                        total -= nbytes
                        candidate.copies = None

    def wake_waiters(self) -> None:
        """Wake the waiting threads to check conditions again."""
        with self._news:
            self._news.notify_all()

    def forget_driver(self) -> None:
        """Drop the residents of a driver that has released this worker."""
        with self._news:
            for key in [key for key in self.entries if self._scope.is_of_former_driver(key)]:
                del self.entries[key]
            self._news.notify_all()

    def close(self) -> None:
        """Drop all parts, and wake the waiting threads, after the scope was closed."""
        with self._news:
            self.entries.clear()
            self._news.notify_all()

    def pop_written(self, keys: Iterable[int] | None = None, by: str | None = None) -> Iterable[ResidentWrite]:
        """Yield residents that were changed in place since they were stored; `keys` limits the search.

        `by` is the label of the call that has run. If it is None, a call that borrows the value is named, if there is
        one.
        """
        for key in list(self.entries) if keys is None else keys:
            entry = self.entries.get(key)
            if entry is not None and entry.watch is not None and entry.watch.was_written():
                # Each write is reported once, by the method that wrote. From then on the value is poisoned.
                entry.watch = None
                writer = by or next(iter(entry.borrowers), None)
                entry.error = (
                    f"resident {key}, returned by {entry.maker}, was changed in place"
                    f"{f' by {writer}' if writer else ''}; it can't be used any more"
                )
                entry.copies = None
                yield key, entry.maker, writer

    def list_values(self) -> list[tuple[str, Any]]:
        """Return the producer's label and the value, for each ready part and for each host copy."""
        entries = [entry for entry in list(self.entries.values()) if entry.ready]
        copies = [(entry.maker, entry.copies) for entry in entries] if self.copies_bytes else []
        return [
            *((entry.maker, entry.value) for entry in entries),
            *((maker, host_copies.list_copies()) for maker, host_copies in copies if host_copies is not None),
        ]

    def list_keys_of(self, role: str) -> list[int]:
        """Return the keys of residents that a role has returned."""
        return [key for key, entry in list(self.entries.items()) if entry.maker.partition(".")[0] == role]

"""Manage residents on the driver: keep, lend to calls, release with the last reference, and fetch.

The group owns the bytes. A handle (`KeptResident`) is the lease.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs

from colocate._calls.failures import failure_error
from colocate._calls.order import CallOrder
from colocate._calls.pending import OnEnd, PendingCall, unpack_result
from colocate._calls.records import FetchRecord
from colocate._definitions.packed import count_packed_bytes
from colocate._owned.owned import Owned
from colocate._protocol import from_worker, to_worker
from colocate._protocol.message import Message
from colocate._protocol.requests import Requests
from colocate._protocol.uses import Source
from colocate._signals.guard import calls_users_code
from colocate._system.deadline import Deadline
from colocate._system.here import ThreadTask
from colocate._system.jobs import format_error
from colocate._system.limits import RELEASED_AFTER_S
from colocate._system.lines import find_caller
from colocate.errors import ClosedError, ColocateError, DispatchError

if TYPE_CHECKING:
    from colocate._calls.handles import KeptResident
    from colocate._worker_group.worker_group import WorkerGroup

_log = logging.getLogger("colocate")


class Pin:
    """Keeps a resident's value in the workers while referenced by the handle or by a call with this argument.

    There is no count of references, so that an interruption leaves nothing behind: the user's frames drop their pins.
    """

    __slots__ = ("__weakref__",)


@attrs.define(eq=False)
class ResidentRecord:
    """The driver's record of one resident.

    Attributes:
        source: The resident as workers know it.
        call: The call that makes the value.
        handle: The handle; references to the resident keep the handle alive.
        ending: Weak reference whose callback records the end of the pin.
        is_used: Whether a user has received the call's outcome, or has passed the resident to another call.
        released: What has freed the resident, except for a dropped handle.
        loss: Why the resident's workers are gone.
    """

    source: Source
    call: PendingCall
    handle: weakref.ref[KeptResident[Any]]
    ending: weakref.ref[Pin]
    is_used: bool = False
    released: str | None = None
    loss: ColocateError | None = None

    @property
    def freed_by(self) -> str | None:
        """The event that has ended the lease, as text; None during the lease."""
        return "dropping its handle" if self.released is None and self.handle() is None else self.released

    @property
    def error(self) -> BaseException | None:
        """The error that explains a missing value: the failure of the call, or the loss of the workers."""
        return self.call._error or self.loss

    @property
    def is_unreported(self) -> bool:
        """Whether the call has failed, and no user has received the error here or from another call."""
        error = self.call._error
        return error is not None and not self.is_used and not (isinstance(error, ColocateError) and error._is_reported)

    def sizes(self) -> list[int]:
        """Return the rows of each part, in the order of joining, once the call is done."""
        source = self.source
        counted = source.collect.sources(source.ranks)
        sizes = source.ranks.pick([size[1] for size in self.call.bodies], counted)
        for rank, size in zip(counted, sizes, strict=True):
            if size is None:
                raise DispatchError(f"what {source.label} has kept on rank {rank} has no rows to join", rank=rank)
        return list(sizes)


@attrs.frozen(eq=False)
class Borrow:
    """The use of a resident by an unfinished call of another group, which keeps the value alive."""

    pin: Pin
    call: weakref.ref[PendingCall]
    borrower: Residents
    record: ResidentRecord
    text: str

    def abort_call(self, error: ColocateError) -> None:
        call = self.call()
        if call is not None:
            self.borrower.order.abort_call(call, error)


@attrs.define(eq=False)
class Scope:
    """A block of one thread or task that frees the residents kept inside. `line` is the block's first line.

    Only the block itself holds a strong reference, so the scope ends wherever the block is interrupted.
    """

    residents: Residents
    line: tuple[str, int]
    records: list[ResidentRecord] = attrs.field(factory=list)
    place: ThreadTask = attrs.field(factory=ThreadTask)


class PartRefused(Exception):
    """Raised if a worker refuses to send a part of a resident; has the failure and the packed exception."""

    def __init__(self, slot: int, failure: from_worker.Failure, body: Any) -> None:
        super().__init__(slot)
        self.slot, self.failure, self.body = slot, failure, body


_open: ContextVar[tuple[weakref.ref[Scope], ...]] = ContextVar("colocate_scopes", default=())


class Residents:
    """The residents of a group.

    Workers may forget a resident once the handle is dropped or freed, and all calls that use it have ended.

    Attributes:
        link: The group.
        order: The order of the group's calls.
        records: The residents by key: until freed, their calls ended, and failures reported.
        ended: Keys of residents that workers may free, but haven't been asked to.
        scopes: The open scopes of all threads and tasks.
    """

    def __init__(self, link: WorkerGroup, order: CallOrder) -> None:
        self.link = link
        self.order = order
        self.records: dict[int, ResidentRecord] = {}
        self.ended: deque[int] = deque()
        self.scopes: weakref.WeakSet[Scope] = weakref.WeakSet()
        self._over: list[
            ResidentRecord
        ] = []  # Residents that were freed before their calls had ended; the calls have ended now.
        self._borrows: dict[weakref.ref[Borrow], None] = {}  # A dict keeps the order of the borrows.
        self._flushes_by = 0.0  # A scheduled flush runs before this time.
        # Open questions to this generation's workers, and the function that sends a question.
        self._asking: tuple[Requests[int, Any], Callable[[int, Message], None]] = (
            Requests(link.base),
            link.make_sender(),
        )

    # -- one resident

    def add_record(self, kept: ResidentRecord) -> None:
        self.records[kept.source.key] = kept

    def forget_unsent(self, kept: ResidentRecord) -> None:
        """Forget a resident of a call that couldn't be sent; the caller gets the error."""
        kept.is_used = True
        self.records.pop(kept.source.key, None)

    def check_record(self, kept: ResidentRecord, by: WorkerGroup | None = None) -> None:
        """Raise an error if a resident was freed, was never made because of a failure, or belongs to a closed group.

        The group's state isn't checked again for a call of the same group, which has been checked.
        """
        if self.link.is_forked:
            self.link.check_usable()
        if kept.freed_by is not None:
            raise ClosedError(f"resident of {kept.source.label} was freed by {kept.freed_by}", closed_by=kept.freed_by)
        if (error := kept.error) is not None:
            kept.is_used = True
            if isinstance(error, ColocateError):
                error._is_reported = True
            # Each user gets a copy, because a traceback keeps the user's frames, and so the handle, alive.
            raise copy.copy(error)
        if by is not self.link:
            self.link.check_usable()

    def mark_used(self, kept: ResidentRecord, by: WorkerGroup) -> None:
        """Check a resident that is an argument of a call, and mark the resident as used."""
        self.check_record(kept, by)
        kept.is_used = True

    def pin(self, kept: ResidentRecord) -> Pin:
        """Return the pin of a resident; raise an error if the resident is unusable."""
        handle = kept.handle()
        pin = None if handle is None else handle._hold
        if pin is None or kept.loss is not None:
            self.check_record(kept)
        assert pin is not None, "what was freed is refused"
        return pin

    def release(self, kept: ResidentRecord, by: str) -> None:
        """Release a resident, unless released before; `by` is the reason in words. References may still exist."""
        if kept.freed_by is None:
            kept.released = by
            if (handle := kept.handle()) is not None:
                handle._hold = None

    def state_of(self, kept: ResidentRecord) -> tuple[str, str]:
        """Return a resident's state as a word, and the reason if unusable, without asking a worker."""
        if kept.freed_by is not None:
            return "freed", f"freed by {kept.freed_by}"
        if kept.call._error is not None:
            return "poisoned", format_error(kept.call._error)
        if self.link.closed_by is not None:
            return "lost", f"its group was closed by {self.link.closed_by}"
        if (lost := kept.loss or self.link.failure) is not None:
            return "lost", format_error(lost)
        return "kept" if kept.call.done() else "pending", ""

    # -- scopes

    def open_scopes(self) -> tuple[Scope, ...]:
        """Return the open scopes of this thread or task."""
        scopes = (ref() for ref in _open.get())
        return tuple(
            scope for scope in scopes if scope is not None and scope.residents is self and scope.place.is_current
        )

    def free_at_end(self, scopes: Sequence[Scope], kept: ResidentRecord) -> None:
        for scope in scopes:
            scope.records.append(kept)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Free the residents that this thread or task keeps in a block; raise errors of unused `.keep` calls."""
        scope = Scope(self, find_caller())
        self.scopes.add(scope)
        _open.set((*(ref for ref in _open.get() if ref() is not None), weakref.ref(scope)))
        try:
            yield
        except BaseException:
            self.close_scope(scope)
            raise
        finally:
            _open.set(tuple(ref for ref in _open.get() if ref() is not scope))
        if not self.link.is_forked:  # A forked child owns nothing, and a thread of the parent may hold the lock.
            self._raise(self._take_unreported(scope))

    def close_scope(self, scope: Scope) -> None:
        """Free the residents of a scope. Idempotent."""
        self.scopes.discard(scope)
        for record in scope.records:
            self.release(record, "the end of its scope")

    # -- unreported failures

    def raise_unreported(self) -> None:
        """Raise unreported failures, except for failures that an open scope will raise."""
        self._raise(self._take_unreported(None))

    def _take_unreported(self, scope: Scope | None) -> list[BaseException]:
        """Return unreported errors of `.keep` calls with unused results, for the caller to raise, and close the scope.

        These are the scope's failures, and those of residents that nobody can use any more.
        """
        with self.order.lock:
            mine = () if scope is None else [record for record in scope.records if record.call.done()]
            elsewhere = {record for other in self.scopes if other is not scope for record in other.records}
            dropped = [record for record in list(self.records.values()) if record.freed_by and record not in elsewhere]
            errors: list[BaseException] = []
            for record in (*mine, *dropped):
                error = record.call._error
                if record.is_unreported and error is not None and (error is not self.link.failure or record in mine):
                    record.is_used = True
                    errors.append(error)
                    if record.freed_by:
                        self.records.pop(record.source.key, None)
        if scope is not None:  # The scope is closed last, because a release would log the failures, too.
            self.close_scope(scope)
        return list(dict.fromkeys(errors))

    def _raise(self, errors: Sequence[BaseException]) -> None:
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(
                f"calls of group {self.link.name!r} made by .keep failed, and their residents were never used", errors
            )

    def unreported_failures(self) -> list[BaseException]:
        """Return failures of `.keep` calls with unused results, except for the group's own failure."""
        records = list(self.records.values())
        failed_records = [
            record for record in records if record.is_unreported and record.call._error is not self.link.failure
        ]
        return list(dict.fromkeys(cast("BaseException", record.call._error) for record in failed_records))

    # -- other groups' calls

    def lend(self, call: PendingCall, kept: ResidentRecord, borrower: Residents) -> Pin | Borrow:
        """Lend a resident to a call until the returned object is dropped; raise if the resident is unusable."""
        pin = self.pin(kept)
        if borrower is self:
            return pin
        words = f"{call.label} of group {borrower.link.name!r} uses the resident of {kept.source.label}"
        borrow = Borrow(pin, weakref.ref(call), borrower, kept, words)
        self._borrows[weakref.ref(borrow, self._borrows.pop)] = None
        return borrow

    def _borrowed(self) -> list[Borrow]:
        return [borrow for ref in list(self._borrows) if (borrow := ref()) is not None]

    def borrowers(self, closing: Owned | None = None) -> list[str]:
        """Return descriptions of unfinished uses by other groups, except for groups within `closing`."""
        borrows = self._borrowed()
        texts = [borrow.text for borrow in borrows if closing is None or not borrow.borrower.link.is_within(closing)]
        return list(dict.fromkeys(texts))

    def break_borrows(self) -> None:
        """Fail other groups' calls that use residents of this closing group."""
        by = self.link.closed_by
        for borrow in self._borrowed():
            text = f"{borrow.text}, but group {self.link.name!r} was closed by {by}"
            borrow.abort_call(ClosedError(text, closed_by=by))

    def fail_borrowers(self, kept: ResidentRecord, error: ColocateError) -> None:
        """Fail other groups' calls that use a resident, because the value will never be made."""
        for borrow in self._borrowed():
            if borrow.record is kept:
                borrow.abort_call(error)

    # -- telling workers which residents to forget

    def take_frees(self) -> tuple[int, ...]:
        """Remove and return the keys of residents to free; then call `told`, or put the keys back into `ended`."""
        with self.order.lock:
            frees = tuple(self.ended)
            for _ in frees:  # Other threads may append more keys meanwhile.
                self.ended.popleft()
        return frees

    def told(self, frees: Sequence[int]) -> None:
        """Drop the records of residents that all workers were asked to free. The caller holds the order's lock."""
        for kept in map(self.records.get, frees):
            if kept is not None:
                self._drop_freed(kept)

    def send_frees(self) -> None:
        """Ask all workers now to free the released residents. The caller holds the order's lock."""
        over, self._over = self._over, []
        for record in over:
            self._drop_freed(record)
        if frees := self.take_frees():
            try:
                self.link.send(self.link.live_slots(), to_worker.Free(frees))
            except (OSError, MemoryError):  # No descriptor or memory is free; a later message carries the keys.
                self.ended.extend(frees)
            else:
                self.told(frees)

    def _drop_freed(self, kept: ResidentRecord) -> None:
        """Drop a freed resident's record once its call has ended. A failed call's record stays until reported."""
        key, call, link = kept.source.key, kept.call, self.link
        if self.records.get(key) is not kept:
            return
        if not call.done():
            # The record is dropped after the end of the call.
            call.on_end = partial(self._on_call_over, kept, call.on_end)
        elif not kept.is_unreported:
            del self.records[key]
        elif (error := call._error) is not link.failure:  # The group's own failure is reported elsewhere.
            # The failure is logged now, and raised later by the end of a scope, a checkpoint or a close.
            text = (
                f"{kept.source.label} of group {link.name!r}, kept at {call.line[0]}:{call.line[1]}, has failed, and "
                f"its resident was freed by {kept.freed_by} without a use: {error}"
            )
            link.services.printer.call_soon(lambda: _log.error(text))

    def _on_call_over(
        self, kept: ResidentRecord, then: OnEnd | None, call: PendingCall, error: BaseException | None
    ) -> None:
        self._over.append(kept)
        if then is not None:
            then(call, error)

    def flush_later(self) -> None:
        """Schedule a message that frees released residents, if no other message carries the releases before."""
        if time.monotonic() >= self._flushes_by and (self.records or self.ended) and self.link.alive:
            self.link.services.timers.call_later(RELEASED_AFTER_S, self._flush)
            self._flushes_by = time.monotonic() + 2 * RELEASED_AFTER_S

    def _flush(self) -> None:
        with self.order.lock:
            self._flushes_by = 0.0
            if not self.link.alive:  # The end of the group reports the failures.
                return
            self.send_frees()
        self.flush_later()

    # -- values for the driver

    def wait_until_made(self, kept: ResidentRecord, timeout: float | None) -> Deadline:
        """Wait until a resident's value is made; return the rest of `timeout` (None: `call_timeout`) as a deadline."""
        deadline = Deadline(self.link.services.call_timeout if timeout is None else timeout)
        self.check_record(kept)
        kept.call._check_unsent()
        was_used, kept.is_used = kept.is_used, True
        try:
            kept.call._wait(deadline.seconds_left)
        except BaseException:  # The caller has stopped waiting, and hasn't received the outcome.
            kept.is_used = was_used
            raise
        self.check_record(kept)
        return deadline

    @calls_users_code
    def fetch(self, kept: ResidentRecord, timeout: float | None = None) -> Any:
        deadline = self.wait_until_made(kept, timeout)
        source = kept.source
        source_ranks = list(source.collect.sources(source.ranks))
        answers = dict(zip(source_ranks, self.ask_parts(kept, source_ranks, True, deadline), strict=True))
        parts = [
            unpack_result(self.link, kept.call, source.slot(rank), answers[rank]) if rank in answers else None
            for rank in source.holders
        ]
        ranks = attrs.evolve(source.ranks, rows=kept.call.rows)
        return source.collect.join(parts, ranks)

    def ask_parts(self, kept: ResidentRecord, ranks: Sequence[int], contents: bool, deadline: Deadline) -> list[Any]:
        """Ask ranks for their parts of a resident, or only for the structure; report received parts to observers."""
        (requests, tell), link, call = self._asking, self.link, kept.call

        def send(slot: int, token: int) -> None:
            tell(slot, to_worker.Fetch(token, kept.source.key, contents))

        def too_late(owing: str) -> str:
            return f"worker {owing} has not sent its part of the resident in time"

        pin, asked_at = self.pin(kept), time.time()
        try:
            bodies = requests.ask([kept.source.slot(rank) for rank in ranks], send, deadline, too_late)
        except PartRefused as refused:
            raise failure_error(link, call, refused.slot, refused.failure, refused.body) from None
        finally:
            del pin  # Otherwise a traceback of this frame would keep the pin alive.
        # Parts that were already in this process aren't reported.
        if contents and link.services.observers and not link.services.executor.in_process:
            nbytes = sum(map(count_packed_bytes, bodies))
            fetch_record = FetchRecord(link.name, call.role, call.method, tuple(ranks), nbytes, asked_at, time.time())
            link.services.notify_observers("colocate_result_fetched", fetch_record)
        return bodies

    def on_part(self, slot: int, fetched: from_worker.Fetched, body: Any) -> None:
        if fetched.failure is None:
            self._asking[0].add_answer(fetched.token, slot, body)
        else:
            self._asking[0].add_refusal(fetched.token, PartRefused(slot, fetched.failure, body))

    def fail_requests(self, error: ColocateError) -> None:
        """Fail all waits for parts, because no more parts will arrive."""
        self._asking[0].fail_all(error)

    def start_generation(self, error: ColocateError) -> None:
        """Reset the state for new workers. Existing handles raise the error. The caller holds the order's lock.

        Earlier failures of unused kept calls stay, to be reported.
        """
        for key, record in list(self.records.items()):
            record.loss = error
            if record.is_used or record.call._error in (None, error):
                del self.records[key]
        self._asking = Requests(self.link.base), self.link.make_sender()

"""The residents of one group: kept, lent, released when nobody names them, and fetched to the driver."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, cast

import attrs

from colocate._calls.failures import failure_error, result_of
from colocate._calls.link import Link
from colocate._calls.order import CallOrder
from colocate._calls.pending import PendingCall
from colocate._calls.records import FetchRecord
from colocate._definitions.packed import packed_bytes
from colocate._kept.fetch import Fetches, Refused
from colocate._kept.kept import Hold, Kept
from colocate._kept.leases import Leases
from colocate._owned.owned import Owned
from colocate._protocol.from_worker import Fetched
from colocate._protocol.to_worker import Free
from colocate._role.resident import ResidentSpec
from colocate._signals.off_main import off_main
from colocate._system.deadline import Deadline
from colocate._system.here import Here
from colocate._system.jobs import error_text
from colocate._system.limits import RELEASED_AFTER_S
from colocate._system.lines import caller
from colocate._system.numbers import FOREVER_S
from colocate._values import batch
from colocate._values.collect import Concat
from colocate._values.mesh import Ranks
from colocate.errors import ClosedError, ColocateError

_log = logging.getLogger("colocate")


@attrs.frozen(eq=False)
class Borrow:
    """An unfinished use by another group's call, which has this for as long."""

    hold: Hold
    call: weakref.ref[PendingCall]
    label: str
    borrower: Residents
    kept: Kept

    @property
    def words(self) -> str:
        """What errors say of it."""
        return f"{self.label} of group {self.borrower.link.name!r} uses the resident of {self.kept.source.label}"

    def break_off(self, error: ColocateError) -> None:
        """The call fails of this."""
        call = self.call()
        if call is not None:
            self.borrower.order.break_off(call, error)


@attrs.define(eq=False)
class Scope:
    """A block of one thread and task that frees what is kept in it; `line` entered it.

    Only the block itself has it, others refer to it weakly: so it ends wherever the block is interrupted.
    """

    of: Residents
    line: tuple[str, int]
    kept: list[Kept] = attrs.field(factory=list)
    here: Here = attrs.field(factory=Here)


_open: ContextVar[tuple[weakref.ref[Scope], ...]] = ContextVar("colocate_scopes", default=())


class Residents(Leases):
    """What a group keeps in its workers.

    Attributes:
        link: The group.
        order: The order of its calls.
        scopes: The scopes that are open, in whatever thread and task.
    """

    def __init__(self, link: Link, order: CallOrder) -> None:
        super().__init__()
        self.link = link
        self.order = order
        self._fetches = Fetches(link.teller(), link.base)
        self._borrows: dict[weakref.ref[Borrow], None] = {}  # in their order
        self.scopes: weakref.WeakSet[Scope] = weakref.WeakSet()
        self._flushes_by = 0.0  # when somebody does, unless that was interrupted

    # -- one resident

    def check(self, kept: Kept) -> None:
        """Raise unless it can be used: freed, or made by a call that failed, or its group is closed."""
        self.refuse_fork()
        self._check_kept(kept)
        self.link.check()

    def _check_kept(self, kept: Kept) -> None:
        if kept.freed_by is not None:
            raise ClosedError(f"resident of {kept.source.label} was freed by {kept.freed_by}", closed_by=kept.freed_by)
        error = kept.call._error or kept.lost
        if error is not None:
            kept.used = True
            if isinstance(error, ColocateError):
                error._told = True
            # Each gets a copy: its traceback will hold the frames, and so the handle, of who is told, while the group
            # holds the original for as long as the handle lives.
            raise copy.copy(error)

    def refuse_fork(self) -> None:
        """Raise in a forked child, which owns nothing."""
        if self.link.forked:
            self.link.check()

    def use(self, kept: Kept, by: Link) -> None:
        """It becomes an argument of a call of a group that can be called, which may be this one."""
        if by is self.link:
            self._check_kept(kept)
        else:
            self.check(kept)
        kept.used = True

    def ask(self, kept: Kept) -> None:
        """It is wanted on the driver."""
        self.check(kept)
        kept.call._check_unsent()
        kept.used = True

    def here(self) -> tuple[Scope, ...]:
        """The scopes that the caller's thread or task has open."""
        scopes = (found() for found in _open.get())
        return tuple(each for each in scopes if each is not None and each.of is self and each.here.is_current)

    def free_with(self, scopes: Sequence[Scope], kept: Kept) -> None:
        """It is freed at the end of some scopes of this thread and task."""
        for scope in scopes:
            scope.kept.append(kept)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Free what this thread or task keeps in the block; raise the failures of kept calls that nobody has used."""
        scope = Scope(self, caller())
        self.scopes.add(scope)
        _open.set((*(found for found in _open.get() if found() is not None), weakref.ref(scope)))
        raised = True
        try:
            yield
            raised = False
        finally:
            _open.set(tuple(found for found in _open.get() if found() is not scope))
            errors = self._end(scope, raised)
        self._raise(errors)

    def _end(self, scope: Scope, raised: bool) -> Sequence[BaseException]:
        """Leave a scope; the failures that it is to tell, unless its block has raised something else.

        Where there is nothing to tell, as in nearly every step of a training loop, the main thread does it by itself.
        """
        silent = raised
        try:
            silent = silent or not self._has_failed(scope)
            if silent:
                self.leave(scope)
        except BaseException:  # of a signal's handler
            off_main(lambda: self.leave(scope), in_any_case=True)
            raise
        return () if silent else off_main(lambda: self._tell(scope), in_any_case=True)

    def _has_failed(self, scope: Scope) -> bool:
        """Whether any call has failed of those that the end of a scope may have to tell of."""
        return any(kept.call._error is not None for kept in (*scope.kept, *list(self.kept.values())))

    def _tell(self, scope: Scope) -> Sequence[BaseException]:
        errors = self._untold(scope)  # before they are released, which would have them logged too
        self.leave(scope)
        return errors

    def leave(self, scope: Scope) -> None:
        """Free what was kept in a scope. Idempotent, and it takes no lock."""
        self.scopes.discard(scope)
        for kept in scope.kept:
            self.release(kept, "the end of its scope")

    def release(self, kept: Kept, by: str) -> None:
        """Let go of a resident on behalf of `by`, if nobody has done so before."""
        if kept.freed_by is None:
            kept.free(by)

    def failed_unused(self, kept: Kept) -> None:
        """Log it now; it is raised by its scope, or else by the group's next scope end, checkpoint or close."""
        error, link = kept.call._error, self.link
        if error is link.failure:  # which is told by itself
            return
        where = f"{kept.line[0]}:{kept.line[1]}"
        text = (
            f"{kept.source.label} of group {link.name!r}, kept at {where}, has failed, and nobody has used its "
            f"resident (freed by {kept.freed_by}): {error}"
        )
        link.services.printer.soon(lambda: _log.error(text))

    def raise_untold(self) -> None:
        """Raise what has failed without anybody's having been told, but for what the end of an open scope will."""
        self._raise(self._untold(None))

    def _untold(self, scope: Scope | None) -> list[BaseException]:
        """Known failures of kept calls that nobody has used: those of a scope, and those that nobody can use any more.

        They are told by who asks.
        """
        with self.order.lock:
            mine = () if scope is None else [kept for kept in scope.kept if kept.call.done()]
            elsewhere = {id(kept) for other in self.scopes if other is not scope for kept in other.kept}
            dropped = [kept for kept in list(self.kept.values()) if kept.freed_by and id(kept) not in elsewhere]
            found: list[BaseException] = []
            for kept in (*mine, *dropped):
                error = kept.call._error
                if kept.untold and error is not None and (error is not self.link.failure or kept in mine):
                    kept.used = True
                    found.append(error)
                    if kept.freed_by:
                        self.kept.pop(kept.source.key, None)
        return list(dict.fromkeys(found))

    def _raise(self, errors: Sequence[BaseException]) -> None:
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"kept calls of group {self.link.name!r} failed and were never used", errors)

    def unseen(self) -> list[BaseException]:
        """Failures of kept calls that nobody has used, but for the group's own, which is told by itself."""
        kept = list(self.kept.values())
        found = [each for each in kept if each.untold and each.call._error is not self.link.failure]
        return list(dict.fromkeys(cast("BaseException", each.call._error) for each in found))

    def lend(self, call: PendingCall, kept: Kept, borrower: Residents) -> Hold | Borrow:
        """Have a call use a resident, until it lets go of what this returns. It takes no lock.

        Raises:
            ColocateError: The resident has been freed, or its group has failed.
        """
        hold = self.hold(kept)
        if borrower is self:
            return hold
        borrow = Borrow(hold, weakref.ref(call), call.label, borrower, kept)
        self._borrows[weakref.ref(borrow, self._borrows.pop)] = None
        return borrow

    def _borrowed(self) -> list[Borrow]:
        return [borrow for each in list(self._borrows) if (borrow := each()) is not None]

    def borrowers(self, closing: Owned) -> list[str]:
        """Unfinished uses by groups that don't lie in what is closing."""
        found = [borrow.words for borrow in self._borrowed() if not borrow.borrower.link.lies_in(closing)]
        return list(dict.fromkeys(found))

    def lent(self) -> list[str]:
        """Unfinished uses by any other group."""
        return list(dict.fromkeys(borrow.words for borrow in self._borrowed()))

    def break_borrows(self) -> None:
        """The group is closing: calls of other groups that use its residents fail of that."""
        link = self.link
        for borrow in self._borrowed():
            error = ClosedError(
                f"{borrow.words}, but group {link.name!r} was closed by {link.closed_by}", closed_by=link.closed_by
            )
            borrow.break_off(error)

    def never_made(self, kept: Kept, error: ColocateError) -> None:
        """A resident will not be: calls of other groups that use it fail of that."""
        for borrow in self._borrowed():
            if borrow.kept is kept:
                borrow.break_off(error)

    def flush_later(self) -> None:
        """See to it that the workers are told of what is released. It takes no lock; to be told twice does no harm."""
        if time.monotonic() >= self._flushes_by and (self.kept or self.news) and self.link.alive:
            self.link.services.timers.after(RELEASED_AFTER_S, self._flush)
            self._flushes_by = time.monotonic() + 2 * RELEASED_AFTER_S

    def _flush(self) -> None:
        """After a while of quiet: release what no message has carried."""
        with self.order.lock:
            self._flushes_by = 0.0
            if not self.link.alive:  # its end tells what has failed
                return
            self.tell()
        self.flush_later()

    def tell(self) -> None:
        """Have all workers forget now what they may. The order's lock is held."""
        keys = self.take()
        try:
            if keys:
                self.link.send(self.link.live(), Free(keys))
        except (OSError, MemoryError):  # no descriptor or memory is left just now; a call will tell
            self.put_back(keys)

    def wait(self, kept: Kept, timeout: float | None) -> None:
        """Wait until a resident is there.

        Raises:
            TimeoutError: It isn't after so many seconds (None: after the runtime's `call_timeout`).
        """
        self._made(kept, Deadline(self.link.services.call_timeout if timeout is None else timeout))

    def fetch(self, kept: Kept, timeout: float | None = None) -> Any:
        """The collected value of a resident, on the driver.

        Raises:
            TimeoutError: It isn't there after so many seconds (None: after the runtime's `call_timeout`).
        """
        deadline = Deadline(self.link.services.call_timeout if timeout is None else timeout)
        self._made(kept, deadline)
        source = kept.source
        wanted = list(source.collect.sources(source.ranks))
        answers = dict(zip(wanted, self._ask(kept, wanted, True, deadline), strict=True))
        parts = [
            result_of(self.link, kept.call, source.slot(rank), answers[rank][1]) if rank in answers else None
            for rank in source.holders
        ]
        ranks = Ranks(source.ranks.world_size, source.ranks.meshes, kept.call.rows, None, source.ranks.targets)
        return source.collect.join(parts, ranks)

    def _ask(self, kept: Kept, ranks: Sequence[int], contents: bool, deadline: Deadline) -> list[Any]:
        """What some ranks say of their parts; observers are told of contents."""
        return off_main(lambda: self._asked(kept, ranks, contents, deadline))

    def _asked(self, kept: Kept, ranks: Sequence[int], contents: bool, deadline: Deadline) -> list[Any]:
        hold, asked = self.hold(kept), time.time()
        try:
            slots = [kept.source.slot(rank) for rank in ranks]
            answers = self._fetches.get(slots, kept.source.key, contents, deadline)
        except Refused as refused:
            raise failure_error(self.link, kept.call, refused.slot, refused.failure, refused.body) from None
        finally:
            del hold  # a traceback keeps what is in frames
        if contents:
            self._tell_fetched(kept, ranks, [body for _, body in answers], asked)
        return answers

    def _tell_fetched(self, kept: Kept, ranks: Sequence[int], bodies: Sequence[Any], asked: float) -> None:
        """Tell observers, unless the parts were in this process anyway."""
        services, call = self.link.services, kept.call
        if services.observers and not services.executor.in_process:
            nbytes = sum(map(packed_bytes, bodies))
            record = FetchRecord(self.link.name, call.role, call.method, tuple(ranks), nbytes, asked, time.time())
            services.tell("colocate_result_fetched", record)

    def state_of(self, kept: Kept) -> tuple[str, str]:
        """What a resident is, in a word, and why it can't be used, if so; nobody is asked."""
        if kept.freed_by is not None:
            return "freed", f"freed by {kept.freed_by}"
        if kept.call._error is not None:
            return "poisoned", error_text(kept.call._error)
        if self.link.closed_by is not None:
            return "lost", f"its group was closed by {self.link.closed_by}"
        if (lost := kept.lost or self.link.failure) is not None:
            return "lost", error_text(lost)
        return "kept" if kept.call.done() else "pending", ""

    def spec_of(self, kept: Kept) -> ResidentSpec:
        """What a resident holds."""
        deadline = Deadline(self.link.services.call_timeout)
        self._made(kept, deadline)
        source = kept.source
        counted = source.collect.sources(source.ranks) or source.holders
        _, body = self._ask(kept, counted[:1], False, deadline)[0]
        structure = result_of(self.link, kept.call, source.slot(counted[0]), body)
        sizes = tuple(size[0] for size in kept.call.bodies)
        return ResidentSpec(structure, sizes, tuple(kept.call.rows))

    def rows_of(self, kept: Kept) -> list[int]:
        """Rows of each part of a resident, in the order in which they are joined; waits for them."""
        self._made(kept, Deadline(FOREVER_S))
        source = kept.source
        if not isinstance(source.collect, Concat):
            # It is no sequence of parts: only the value itself tells.
            return [batch.rows(self.fetch(kept), f"the resident of {source.label}")]
        return kept.sizes()

    def answered(self, slot: int, fetched: Fetched, body: Any) -> None:
        """A worker has sent a part."""
        self._fetches.answered(slot, fetched, body)

    def fail(self, error: ColocateError) -> None:
        """No part will come any more."""
        self._fetches.fail(error)

    def renew(self, error: ColocateError) -> None:
        """Begin anew with other workers, after `fail`. Who still has a handle is told the error."""
        self.forget(error)
        self._fetches = Fetches(self.link.teller(), self.link.base)

    def _made(self, kept: Kept, deadline: Deadline) -> None:
        """Wait until it is there."""
        kept.call._wait(deadline.left)
        self.check(kept)

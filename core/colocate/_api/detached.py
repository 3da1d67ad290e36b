"""Detaching and attaching: a pool changes its driver. What a driver does; `keeper/leased.py` has the other half.

Whoever detaches a pool is through with it. Whoever attaches it borrows it: the end of that, however it comes, leaves
the pool as it is; or owns it (`own=True`), and then it ends with its driver as any other. One driver commands a pool at
a time, and each has an epoch higher than any before: the numbers of its calls, holds and residents begin above those of
the epoch before, so that nothing of one is ever taken for something of another.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from colocate._api import pool_record
from colocate._api.connection import Connection
from colocate._api.pool_record import GroupRecord
from colocate._api.slots import Slots
from colocate._calls.failures import hung_error
from colocate._calls.stacks import NO_ANSWER
from colocate._crew.attachment import Attachment
from colocate._crew.crew import Crew
from colocate._owned.lifecycle import State
from colocate._owned.owned import raise_together
from colocate._signals.off_main import off_main
from colocate._system.lines import at, caller, origin
from colocate._system.numbers import FOREVER_S, duration_problem
from colocate.errors import BorrowedError, ColocateError, ConfigError, EngineError
from colocate.executor import Detachable, Lease, Reservation

_AGAIN_S = 0.5

# -- detach


def detach(pool: Slots, name: str, ttl: float) -> None:
    """See `Pool.detach`."""
    _check_lease(name, ttl)
    pool.check()
    pool.connection.require(Detachable, f"detach pool {pool.name!r}")
    executor = cast("Detachable", pool.connection.services.executor)
    if not pool.request.detachable:
        raise ConfigError(
            f"pool {pool.name!r} was reserved without detachable=True: runtime.reserve(..., detachable=True)"
        )
    if pool.attachment is not None and not pool.attachment.own:
        raise ConfigError(
            f"pool {pool.name!r} is borrowed, and stays detached as {pool.attachment.name!r} when this borrow is closed"
            f"; runtime.attach({pool.attachment.name!r}, own=True) takes it, and may detach it again"
        )
    file, number = caller()
    by = f"detaching pool {pool.name!r} as {name!r} at {file}:{number}; runtime.attach({name!r}) takes it up"
    groups = _close_all(pool, by)
    assert pool.reservation is not None
    try:
        executor.publish(pool.reservation, _lease(pool, groups, name, ttl))
    except BaseException:
        _reopen(pool, groups)
        raise
    failed = [error for group in groups for error in group.residents.unseen()]
    _left(pool, groups)
    executor.let_go(pool.reservation)
    raise_together(f"pool {pool.name!r} was detached, and this had gone wrong", failed)


def _check_lease(name: str, ttl: Any) -> None:
    if not isinstance(name, str) or not name or any(not (each.isalnum() or each in "-_.") for each in name):
        raise ConfigError(f"a pool can't be detached as {name!r}: use letters, digits, '-', '_' and '.'")
    if duration_problem(ttl, positive=True) is not None or ttl >= FOREVER_S:
        raise ConfigError(
            f"pool.detach({name!r}, ttl={ttl!r}): give seconds. They are how long it lives without a driver; "
            "a pool without an end would be a leak"
        )


def _close_all(pool: Slots, by: str) -> list[Crew]:
    """Refuse all new uses at once, or none; the groups."""
    with contextlib.ExitStack() as locks:
        locks.enter_context(pool.lock)
        groups = pool.crews
        for group in groups:
            locks.enter_context(group.order.lock)
            group.order.gate.shut("its detaching")  # calls are posted without that lock
            locks.callback(group.order.gate.open, "its detaching")
        pool.check()
        if pool.reservation is None:
            raise pool.unreserved("can't be detached: it ")
        for group in groups:
            _check_idle(group)
        for each in (pool, *groups):
            each.mark_closed(by)
    return groups


def _check_idle(group: Crew) -> None:
    """Raise when detaching it would break something."""
    group.check()
    if group.life.state is not State.READY:
        raise ColocateError(f"group {group.name!r} can't be detached while it is {group.state}")
    if group.order.pending:
        first = next(iter(list(group.order.pending.values())))
        raise ColocateError(
            f"group {group.name!r} can't be detached while calls are pending ({len(group.order.pending)}, the first is "
            f"{first.label}): wait for them"
        )
    if lent := group.residents.borrowers():
        raise ColocateError(f"group {group.name!r} can't be detached: {'; '.join(lent)}. Wait for that")


def _reopen(pool: Slots, groups: Sequence[Crew]) -> None:
    """Be as before, unless another driver has got it meanwhile."""
    assert pool.reservation is not None
    for node in (pool, *groups):
        node.life.reopen()
    if not cast("Detachable", pool.connection.services.executor).retain(pool.reservation):
        lost(pool, "another driver")
    for group in groups:
        group.workforce.look()


def _lease(pool: Slots, groups: Sequence[Crew], name: str, ttl: float) -> Lease:
    kept = frozenset(worker.host.token for group in groups for worker in group.workforce.workers)
    return Lease(
        name, float(ttl), kept, pool_record.record_of(pool, groups, float(ttl)), pool_record.about(pool, groups)
    )


def _changed(pool: Slots) -> None:
    """Groups of the pool have come, gone or been restarted: those after this driver are to find what there is."""
    attachment = pool.attachment
    executor = pool.connection.services.executor
    if attachment is None or pool.reservation is None or pool.closed_by is not None:
        return
    with attachment.lock:
        groups = [group for group in pool.crews if attachment.own or group.name in attachment.groups]
        attachment.groups = {group.name for group in groups}
        cast("Detachable", executor).renew(pool.reservation, _lease(pool, groups, attachment.name, attachment.ttl))


# -- attach


def attach(connection: Connection, name: str, own: bool) -> Slots:
    """See `Runtime.attach`."""
    executor = cast("Detachable", connection.services.executor)
    fence = _Fence()
    adopted = executor.adopt(name, _who(), own, fence.fenced)
    try:
        connection.check()
        record = pool_record.load(adopted.record, name)
        pool = Slots(connection, record.name, record.request, record.budget)
    except BaseException:
        executor.let_go(adopted.reservation)
        raise
    pool.attachment = Attachment(
        name, own, record.ttl, {group.name for group in record.groups}, changed=lambda: _changed(pool)
    )
    pool.epoch = adopted.epoch
    try:
        pool.hold(adopted.reservation)
        fence.watch(pool)
        taken = [_taken(pool, each) for each in record.groups]
        connection.check()
        pool.check()  # another driver may have taken it meanwhile
        for group in taken:
            _greet(group)
    except BaseException as error:
        pool.attachment.own = False  # it goes on
        pool.close_after(error, "its failed attachment", 0.0)
        raise
    return pool


class _Fence:
    """Hears that another driver has taken a pool, perhaps before there is one."""

    def __init__(self) -> None:
        self._pool: Slots | None = None
        self._by: str | None = None
        self._lock = threading.Lock()

    def fenced(self, by: str) -> None:
        """Another driver has it. On the thread that hears messages."""
        with self._lock:
            self._by = by
            pool = self._pool
        if pool is not None:
            lost(pool, by)

    def watch(self, pool: Slots) -> None:
        """Tell a pool, also when it has happened already."""
        with self._lock:
            self._pool = pool
            by = self._by
        if by is not None:
            lost(pool, by)


def _taken(pool: Slots, record: GroupRecord) -> Crew:
    other = pool.connection.crews.get(record.name)
    if other is not None:
        assert pool.attachment is not None
        raise ConfigError(
            f"pool {pool.attachment.name!r} can't be attached: it has a group {record.name!r}, and so has this "
            f"runtime, made at {at(other.line)}; names are unique in a runtime. Close that one first, attach by "
            "another runtime, or give the groups of either names of their own when they are spawned (name=...)"
        )
    group = pool.place(record.slots, record.declared(), record.name, record.restarts, record.generation)
    group.seed, group.line, group.created = record.seed, record.line, record.created
    group.restarts.checkpoint, group.restarts.restored = record.checkpoint, record.restored
    group.taught.follows(record.script, record.modules)
    for role, tags in record.until_woken.items():
        group.sleepers.mark(role, tags, until_woken=True)
    executor = cast("Detachable", pool.connection.services.executor)
    group.workforce.take(executor, record.tokens)
    return group


def _greet(group: Crew) -> None:
    """Wait until its workers have heard of their new driver; then have them all come back from what they were in."""
    silent = group.workforce.wait_hello(group.grace)
    group.workforce.ready()
    if silent and group.failure is None:
        group.fail(hung_error(group, silent[0], False, None, NO_ANSWER))
    elif group.failure is None:
        group.order.begin_anew()


# -- the end


def _left(pool: Slots, groups: Sequence[Crew]) -> None:
    """Nothing of it is this driver's any more."""
    for group in groups:
        group.leave()
    pool.disown()
    pool.life.end()


def lost(pool: Slots, by: str) -> None:
    """Another driver has taken it. On the thread that hears messages: nothing here waits."""
    words = f"{by}, who has taken it"
    with pool.lock:  # whoever puts a group on it has done so, or will not
        is_first, groups = pool.mark_closed(words), pool.crews
    if not is_first:  # it is being closed here, which this cuts short
        for group in groups:
            if group.mark_closed(words):
                group.residents.break_borrows()
                group.leave()
        return
    for group in groups:
        if group.mark_closed(words):
            group.residents.break_borrows()
    _left(pool, groups)
    if pool.reservation is not None:
        _let_go_beside(pool.connection, pool.reservation)


def _let_go_beside(connection: Connection, reservation: Reservation) -> None:
    """Let go of a reservation, on a thread of its own; where none is to be had, a moment later."""
    let_go = cast("Detachable", connection.services.executor).let_go
    try:
        threading.Thread(target=let_go, args=(reservation,), name="colocate-fenced", daemon=True).start()
    except RuntimeError:
        connection.services.timers.after(_AGAIN_S, lambda: _let_go_beside(connection, reservation))


def close_detached(connection: Connection, name: str, force: bool) -> None:
    """End a detached pool, whoever made it.

    Args:
        connection: One to its cluster.
        name: Its name.
        force: Take it from the driver that is attached.

    Raises:
        BorrowedError: A driver is attached (without `force`).
        ConfigError: There is no such pool.
    """
    off_main(lambda: _close_detached(connection, name, force))


def _close_detached(connection: Connection, name: str, force: bool) -> None:
    executor = cast("Detachable", connection.services.executor)
    borrowed = None
    if not force:
        try:
            borrowed = executor.adopt(name, _who(), False, lambda by: None)  # nobody else gets in from now on
        except BorrowedError as error:
            raise BorrowedError(
                f"pool {name!r} is attached by {'; '.join(error.borrowers)}. Wait for that to end, or break it: "
                f"colocate close {name} --force",
                borrowers=error.borrowers,
            ) from None
        except EngineError as error:  # it is stuck, or has just gone
            raise EngineError(
                f"{error.message}. colocate close {name} --force ends a pool that doesn't answer"
            ) from None
    try:
        pool = attach(connection, name, own=True)
    except Exception:  # its record is of another version, say: end it without asking its workers
        try:
            connection.services.executor.release(executor.adopt(name, _who(), True, lambda by: None).reservation)
        except EngineError:
            executor.end(name)
    else:
        with contextlib.suppress(ExceptionGroup):  # what had gone wrong with it before
            pool.close_here(pool.by_caller(), 10.0, False)
    finally:
        if borrowed is not None:
            executor.let_go(borrowed.reservation)


def _who() -> str:
    return f"driver {os.getpid()} on {platform.node()} ({at(origin())})"


def seen(found: Mapping[str, Any]) -> dict[str, Any]:
    """A listed pool, as JSON has it."""
    return {**found, "since": time.strftime("%FT%T%z", time.localtime(found["since"]))}

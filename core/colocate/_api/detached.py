"""Detach pools, and attach detached pools, in a driver. `keeper/keeper.py` has the keepers' side.

A driver that detaches a pool can't use it any more. A driver that attaches the pool borrows it: the end of the borrow
leaves the pool alive, for any reason. Or the driver owns the pool (`own=True`), which then ends with its driver like
any other. One driver commands a pool at a time, and each has a higher epoch than all before: the numbers of calls,
holds and residents start above those of the epoch before, so that they never collide.

A pool's record has everything that later drivers need to take the pool over without a start.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import threading
from collections.abc import Sequence
from typing import Any, cast

import attrs

from colocate._api.connection import Connection
from colocate._api.slots import Slots
from colocate._calls.failures import hung_error
from colocate._calls.order import NO_ANSWER
from colocate._definitions.bundles import pack_whole, unpack_whole
from colocate._owned.owned import State, raise_together
from colocate._role.budget import Budget
from colocate._role.role import RoleInfo, check_role
from colocate._signals.deferred import run_deferred
from colocate._system.lines import find_caller, format_line, get_origin
from colocate._system.numbers import FOREVER_S, find_duration_problem, find_name_problem
from colocate._system.threads import Thread
from colocate._version import __version__
from colocate._worker_group.spawn import Declared
from colocate._worker_group.worker_group import Attachment, WorkerGroup
from colocate.errors import BorrowedError, ClusterError, ColocateError, ConfigError
from colocate.executor import Detachable, Lease, Request, Reservation

_FORM = 12  # Increase this if a record's pickled contents change without a new version of colocate.
_AGAIN_S = 0.5

# -- the record


@attrs.frozen
class GroupRecord:
    """The record of one group of a detached pool, for later drivers.

    Attributes:
        name: The group's name.
        roles: The roles, pickled; classes outside of installed distributions are included by value.
        slots: The group's slots of the pool.
        tokens: Tokens for taking over the workers, by slot.
        generation: How often the group has been restarted.
        seed: The seed of the runtime that made the group.
        line: The line that made the group.
        created: Time of the creation.
        restarts: The largest number of restarts.
        script: The process whose script the workers have, in the form of `ids`.
        modules: The modules that the workers have from a driver: file and digest, by name.
    """

    name: str
    roles: bytes = attrs.field(repr=False)
    slots: tuple[int, ...]
    tokens: tuple[bytes, ...] = attrs.field(repr=False)
    generation: int
    seed: int
    line: tuple[str, int]
    created: float
    restarts: int
    script: int
    modules: dict[str, tuple[str, str]]
    parts: dict[str, Any]  # The state of each feature of the group, by feature name.

    def load_roles(self) -> Declared:
        """Return the group's roles, or raise ColocateError if their import fails."""
        try:
            (default_group, torchrun, distributions, budgets, env, roles), definitions = unpack_whole(self.roles)
        except ColocateError as error:
            raise ColocateError(f"group {self.name!r} can't be taken up here: {error.message}") from error
        except Exception as error:  # A module or class may be missing, or an import may raise.
            raise ColocateError(
                f"the roles of group {self.name!r} can't be imported here: {type(error).__name__}: {error}; install "
                "what they come from (colocate close NAME works without)"
            ) from error
        infos = {
            name: RoleInfo(name, cls, check_role(name, cls), slots, meshes, origin)
            for name, (cls, _, slots, meshes, origin) in roles.items()
        }
        specs = {name: spec for name, (_, spec, *_) in roles.items()}
        return Declared(infos, specs, distributions, default_group, torchrun, definitions, budgets, env)


@attrs.frozen
class PoolRecord:
    """The record of a detached pool with all groups, for later drivers."""

    name: str
    request: Request
    budget: Budget
    ttl: float
    groups: tuple[GroupRecord, ...]


def _make_lease(pool: Slots, groups: Sequence[WorkerGroup], name: str, ttl: float) -> Lease:
    records = []
    for group in groups:
        declared, restarts = group.declared, group.restarts
        roles = {
            role: (info.cls, declared.specs[role], info.slots, info.meshes, info.origin)
            for role, info in declared.infos.items()
        }
        how = dict(declared.distributions), declared.budgets, dict(declared.env)
        whole = declared.default_group, declared.torchrun, *how, roles
        records.append(
            GroupRecord(
                group.name,
                pack_whole(whole, f"what the roles of group {group.name!r} are made of"),
                tuple(group.indices),
                tuple(worker.host.token for worker in group.workforce.workers),
                group.generation,
                group.seed,
                group.line,
                group.created,
                restarts.limit,
                group.published.script,
                dict(group.published.shipped_modules.contents),
                {name: state for name, part in group.parts.items() if (state := part.handover_state()) is not None},
            )
        )
    pool_record = PoolRecord(pool.name, pool.request, pool.budget, float(ttl), tuple(records))
    about = {
        "pool": pool.name,
        "slots": len(pool.places),
        "nodes": sorted({place.node for place in pool.places}),
        "groups": {group.name: list(group.roles) for group in groups},
    }
    workers = frozenset(token for record in records for token in record.tokens)
    return Lease(name, float(ttl), workers, pickle.dumps((_versions(), pickle.dumps(pool_record))), about)


def load_record(record: bytes, name: str) -> PoolRecord:
    """Unpickle a pool's record, or raise ColocateError if other versions of colocate or Python wrote the record."""

    def words(version: str, python: str, form: int = 1) -> str:
        return f"colocate {version} (records of form {form}) and Python {python}"

    stored, body = pickle.loads(record)
    if stored != (current := _versions()):
        raise ColocateError(
            f"pool {name!r} was detached by a driver with {words(*stored)}, and this one has {words(*current)}: "
            "attach with the same versions (colocate close NAME works with any)"
        )
    pool_record: PoolRecord = pickle.loads(body)
    return pool_record


def _versions() -> tuple[str, str, int]:
    return __version__, platform.python_version().rpartition(".")[0], _FORM


# -- detach


def detach(pool: Slots, name: str, ttl: float) -> None:
    if (problem := "must be text, not None" if name is None else find_name_problem(name)) is not None:
        raise ConfigError(f"pool.detach(name) {problem}")
    if find_duration_problem(ttl, positive=True) is not None or ttl >= FOREVER_S:
        raise ConfigError(
            f"pool.detach({name!r}, ttl={ttl!r}): give seconds. They are how long it lives without a driver; "
            "a pool without an end would be a leak"
        )
    pool.check_usable()
    pool.connection.require(Detachable, f"detach pool {pool.name!r}")
    executor = cast("Detachable", pool.connection.services.executor)
    if not pool.request.detachable:
        raise ConfigError(
            f"pool {pool.name!r} was reserved without detachable=True: runtime.reserve(..., detachable=True)"
        )
    if pool.attachment is not None and not pool.attachment.is_owner:
        raise ConfigError(
            f"pool {pool.name!r} is borrowed, and stays detached as {pool.attachment.name!r} when this borrow is closed"
            f"; runtime.attach({pool.attachment.name!r}, own=True) takes it, and may detach it again"
        )
    file, number = find_caller()
    by = f"detaching pool {pool.name!r} as {name!r} at {file}:{number}; runtime.attach({name!r}) takes it up"
    groups = _close_all(pool, by)
    reservation = pool.reservation
    assert reservation is not None
    try:
        executor.publish(reservation, _make_lease(pool, groups, name, ttl))
    except BaseException:  # Undo the close, unless another driver has taken the pool meanwhile.
        for node in (pool, *groups):
            node.life.reopen()
        if not executor.retain(reservation):
            close_lost_pool(pool, "another driver")
        for group in groups:
            group.workforce.recheck_exits()
        raise
    failed = [error for group in groups for error in group.residents.unreported_failures()]
    _forget_pool(pool, groups)
    executor.detach(reservation)
    raise_together(f"pool {pool.name!r} was detached with errors", failed)


def _close_all(pool: Slots, by: str) -> list[WorkerGroup]:
    """Refuse new uses of a pool and its groups; return the groups. Raise if calls are pending or residents in use."""
    with contextlib.ExitStack() as locks:
        locks.enter_context(pool.lock)
        groups = pool.worker_groups
        for group in groups:
            locks.enter_context(group.order.lock)
        pool.check_usable()
        if pool.reservation is None:
            raise pool.unreserved_error("can't be detached: it ")
        for group in groups:
            group.check_usable()
            if group.life.state is not State.READY:
                raise ColocateError(f"group {group.name!r} can't be detached while it is {group.state}")
            if (
                label := next(filter(None, (part.background_work() for part in group.parts.values())), None)
            ) is not None:
                raise ColocateError(f"group {group.name!r} can't be detached while {label} is being written")
            if pending := list(group.order.pending.values()):
                raise ColocateError(
                    f"group {group.name!r} can't be detached while calls are pending ({len(pending)}, the first is "
                    f"{pending[0].label}): wait for them"
                )
            if lent := group.residents.borrowers():
                raise ColocateError(f"group {group.name!r} can't be detached: {'; '.join(lent)}. Wait for that")
        for node in (pool, *groups):
            node.life.mark_closing(by)
    return groups


# -- attach


def attach(connection: Connection, name: str, own: bool) -> Slots:
    executor = cast("Detachable", connection.services.executor)
    lock, pools, fenced_by = threading.Lock(), list[Slots](), list[str]()

    def fenced(by: str) -> None:
        """Close the pool here, because another driver has taken it over.

        This runs on the receiving thread, perhaps before the pool exists here.
        """
        with lock:
            fenced_by.append(by)
            groups = list(pools)
        for group_record in groups:
            close_lost_pool(group_record, by)

    adopted = executor.adopt(name, _driver_label(), own, fenced)
    try:
        connection.check_usable()
        record = load_record(adopted.record, name)
        pool = Slots(connection, record.name, record.request, record.budget)
    except BaseException:
        executor.detach(adopted.reservation)
        raise
    named = {group.name for group in record.groups}
    attachment = pool.attachment = Attachment(name, own, record.ttl, named, renew_lease=lambda: _renew_lease(pool))
    pool.epoch = adopted.epoch
    try:
        pool.accept_reservation(adopted.reservation)
        with lock:
            pools.append(pool)
            by = next(iter(fenced_by), None)
        if by is not None:
            close_lost_pool(pool, by)
        groups = [_resume_group(pool, group_record) for group_record in record.groups]
        connection.check_usable()
        pool.check_usable()  # Another driver may have taken the pool meanwhile.
        for group in groups:
            _synchronize_workers(group)
    except BaseException as error:
        attachment.is_owner = False  # The pool must survive the failed attachment.
        pool.close_after(error, "its failed attachment", 0.0)
        raise
    return pool


def _renew_lease(pool: Slots) -> None:
    """Update the record for later drivers after groups of the pool were spawned, closed or restarted."""
    attachment = pool.attachment
    executor = pool.connection.services.executor
    if attachment is None or pool.reservation is None or pool.closed_by is not None:
        return
    with attachment.lock:
        groups = [group for group in pool.worker_groups if attachment.is_owner or group.name in attachment.groups]
        attachment.groups = {group.name for group in groups}
        cast("Detachable", executor).update_lease(
            pool.reservation, _make_lease(pool, groups, attachment.name, attachment.ttl)
        )


def _resume_group(pool: Slots, record: GroupRecord) -> WorkerGroup:
    """Take over a group with running workers, as the record describes the group."""
    other = pool.connection.worker_groups.get(record.name)
    if other is not None:
        assert pool.attachment is not None
        raise ConfigError(
            f"pool {pool.attachment.name!r} can't be attached: it has a group {record.name!r}, and so has this "
            f"runtime, made at {format_line(other.line)}; names are unique in a runtime. Close that one first, "
            "attach by "
            "another runtime, or give the groups of either names of their own when they are spawned (name=...)"
        )
    group = pool.place_group(record.slots, record.load_roles(), record.name, record.restarts, record.generation)
    group.seed, group.line, group.created = record.seed, record.line, record.created
    group.published.adopt_script(record.script, record.modules)
    for name, state in record.parts.items():
        group.get_part(name).resume_handover(state)
    executor = cast("Detachable", pool.connection.services.executor)
    group.workforce.adopt_workers(executor, record.tokens)
    return group


def _synchronize_workers(group: WorkerGroup) -> None:
    """Wait for each worker's first message (`hello`), then stop all ranks at a hold (barrier)."""
    silent = group.workforce.wait_hello(group.grace)
    group.workforce.mark_ready()
    if silent and group.failure is None:
        group.fail_group(hung_error(group, silent[0], None, None, NO_ANSWER))
    elif group.failure is None:
        group.order.hold_all_lanes(group.background)


# -- the end


def _forget_pool(pool: Slots, groups: Sequence[WorkerGroup]) -> None:
    """Close this driver's objects for a pool that this driver no longer commands."""
    for group in groups:
        group.detach()
    pool.disown()
    pool.life.set_closed()


def close_lost_pool(pool: Slots, by: str) -> None:
    """Close a pool that another driver has taken. Runs on the receiving thread, so nothing may block here."""
    reason = f"{by}, who has taken it"
    with pool.lock:  # A concurrent spawn registers its group before this lock is taken, or fails later.
        is_first, groups = pool.life.mark_closing(reason), pool.worker_groups
    for group in groups:
        if group.life.mark_closing(reason):
            group.residents.break_borrows()
            if not is_first:  # This driver is closing the pool already; `detach` ends that close early.
                group.detach()
    if not is_first:
        return
    _forget_pool(pool, groups)
    executor, reservation = cast("Detachable", pool.connection.services.executor), pool.reservation

    def let_go(reservation: Reservation) -> None:
        try:
            Thread(target=executor.detach, args=(reservation,), name="colocate-fenced").start()
        except RuntimeError:  # No thread can start now, so try again a moment later.
            pool.connection.services.timers.call_later(_AGAIN_S, lambda: let_go(reservation))

    if reservation is not None:
        let_go(reservation)


def close_detached(connection: Connection, name: str, force: bool) -> None:
    """End a detached pool. With `force`, the pool is taken from a driver that has attached it."""
    file, number = find_caller()
    run_deferred(lambda: _close(connection, name, force, f"pool.close() at {file}:{number}"))


def _close(connection: Connection, name: str, force: bool, by: str) -> None:
    executor = cast("Detachable", connection.services.executor)
    borrowed = None
    if not force:
        try:
            # Borrow the pool, so that no other driver can attach it from now on.
            borrowed = executor.adopt(name, _driver_label(), False, lambda by: None)
        except BorrowedError as error:
            raise BorrowedError(
                f"pool {name!r} is attached by {'; '.join(error.borrowers)}. Wait for that to end, or break it: "
                f"colocate close {name} --force",
                borrowers=error.borrowers,
            ) from None
        except ClusterError as error:  # The keeper hangs, or has just exited.
            raise ClusterError(
                f"{error.message}. colocate close {name} --force ends a pool that doesn't answer"
            ) from None
    try:
        pool = attach(connection, name, own=True)
    except Exception:  # Another version may have written the record: end the pool without asking the workers.
        try:
            connection.services.executor.release(
                executor.adopt(name, _driver_label(), True, lambda by: None).reservation
            )
        except ClusterError:
            executor.end_pool(name)
    else:
        with contextlib.suppress(ExceptionGroup):  # Ignore errors from before this close.
            pool.close_here(by, 10.0, False)
    finally:
        if borrowed is not None:
            executor.detach(borrowed.reservation)


def _driver_label() -> str:
    return f"driver {os.getpid()} on {platform.node()} ({format_line(get_origin())})"

"""Build the errors that users get for failures in workers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from colocate._calls.pending import PendingCall
from colocate._protocol.consequence import OWN_WORDS, Consequence, GroupNotCreated, PoisonedPart
from colocate._protocol.from_worker import Failure
from colocate._system.jobs import OUR_FAULT, format_error
from colocate._system.lines import replace_cells
from colocate.errors import (
    CallTimeout,
    CapabilityError,
    ChildDied,
    ColocateError,
    MemoryBudgetError,
    RoleError,
    WorkerDied,
)
from colocate.executor import Exit

if TYPE_CHECKING:
    from colocate._worker_group.worker_group import WorkerGroup


E = TypeVar("E", WorkerDied, RoleError)


def _qualified_names(*kinds: type[ColocateError]) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}


_CONSEQUENCES = _qualified_names(Consequence, PoisonedPart, GroupNotCreated)
_OWN_WORDS = _qualified_names(CapabilityError, ChildDied, *OWN_WORDS)
_OF_A_CALL = ("group", "role", "method", "rank", "node", "remote_traceback", "called_at")


def failure_error(
    link: WorkerGroup, call: PendingCall, slot: int, failure: Failure, body: Any, row: int | None = None
) -> ColocateError:
    kind, text, role = failure.type, failure.text, failure.role
    rank = call.rank_of(slot)
    if (
        failure.host
        and kind in _OWN_WORDS
        and isinstance(role_exception := unpack_exception(link, body, kind, text), ColocateError)
    ):
        # Colocate raised this error, for example about bad arguments, so its text reaches the caller unchanged.
        caller_error = copy.copy(role_exception)
        caller_error.group, caller_error.role, caller_error.method, caller_error.rank = (
            link.name,
            role or call.role or None,
            call.method,
            rank,
        )
        caller_error.node, caller_error.called_at, caller_error.row = link.node(slot), call.called_at, row
        if isinstance(caller_error, ChildDied):
            caller_error.remote_traceback = replace_cells(failure.traceback) or None
        if row is not None:
            caller_error.args = (f"row {row}: {caller_error.message}", *caller_error.args[1:])
        if isinstance(caller_error, MemoryBudgetError) and len(call.targets) > 1 and call.method != "__init__":
            where = f"on rank {rank} of group {link.name!r} (node {link.node(slot)}){_describe_other_ranks(call, slot)}"
            caller_error.args = (f"{caller_error.message}, {where}", *caller_error.args[1:])
        return caller_error
    where = f"{role}.{call.method}" if call.method != "__init__" else f"the constructor of role {role!r}"
    if role is None:
        where = call.label if call.method != "__init__" else "what comes before the constructors of the roles"
    states = _describe_other_ranks(call, slot) if call.method != "__init__" and row is None else ""
    follows = kind in _CONSEQUENCES  # Such an error reports an interruption, and isn't raised by the role.
    how = "was given up" if follows else f"raised {kind}"
    if failure.unmade is not None:
        how, text = "could not begin", f"{failure.unmade} can't be rebuilt there: {kind}: {text}"
    of_row = "" if row is None else f" in row {row},"
    error = RoleError(
        f"{where} {how}{of_row} on rank {rank} of group {link.name!r} (node {link.node(slot)}): {text}{states}",
        group=link.name,
        role=role or call.role or None,
        method=call.method,
        rank=rank,
        node=link.node(slot),
        remote_traceback=replace_cells(failure.traceback),
        called_at=call.called_at,
        row=row,
    )
    error._is_consequence = follows
    if not follows:  # Unpickled later, because this thread reads all connections and mustn't run users' code.
        error._unpickle = lambda: unpack_exception(link, body, kind, text)
    return error


def unsent_error(call: PendingCall, error: BaseException) -> BaseException:
    """Return the error of a call that was never sent. An interruption such as Ctrl-C becomes a `ColocateError`."""
    if isinstance(error, Exception):
        return error
    return ColocateError(
        f"{call.label} was never sent: it was interrupted by {format_error(error)}", method=call.method
    )


def unpack_exception(link: WorkerGroup, body: Any, kind: str, text: str) -> BaseException:
    if body is not None:
        try:
            value = link.unpack(body)
        except BaseException as fault:  # Unpickling runs code of users' classes, which may raise.
            return RuntimeError(f"{kind}: {text} (it can't be unpickled here: {format_error(fault)})")
        if isinstance(value, BaseException):
            return value
    return RuntimeError(f"{kind}: {text} (the exception itself can't be pickled)")


def _describe_other_ranks(call: PendingCall, failed: int) -> str:
    other_slots = [slot for slot in call.targets if slot != failed]
    if not other_slots:
        return ""
    missing = set(call.missing_slots())
    done = [str(call.rank_of(slot)) for slot in other_slots if slot not in missing]
    busy = [str(call.rank_of(slot)) for slot in other_slots if slot in missing]
    parts = ([f"done on rank {', '.join(done[:16])}"] if done else []) + (
        [f"not done on rank {', '.join(busy[:16])}"] if busy else []
    )
    return f" [{'; '.join(parts)}]"


def later_error(error: ColocateError, root: ColocateError | None, follows: bool) -> ColocateError:
    """Return the error of a failed call that had begun before an earlier call's failure was known.

    Args:
        error: The later call's own error.
        root: The first failure.
        follows: Whether the error is a consequence of the first failure. Otherwise its cause is the role's own
            exception, as usual.
    """
    if root is None:
        return error
    message = f"{error.message} (it was begun before an earlier call had failed: {root.message})"
    if not follows:
        error.args = (message, *error.args[1:])
        return error
    later = RoleError(message, **{name: getattr(error, name) for name in _OF_A_CALL})
    later.__cause__ = root
    return later


def timeout_error(link: WorkerGroup, call: PendingCall, timeout: float, stacks: Mapping[int, str]) -> CallTimeout:
    late = list(stacks)
    by_rank = {call.rank_of(slot): stack for slot, stack in stacks.items()}
    paused = f"; role {call.lane!r} is paused until group.resume({call.lane!r})" if link.is_paused(call.lane) else ""
    return CallTimeout(
        f"{call.label} of group {link.name!r} isn't done after {timeout} s on rank "
        f"{', '.join(str(rank) for rank in by_rank)} (of {len(call.targets)} ranks){paused}",
        group=link.name,
        role=call.role,
        method=call.method,
        rank=min(by_rank, default=None),
        node=link.node(late[0]) if late else None,
        stacks=by_rank,
        called_at=call.called_at,
    )


def hung_error(
    link: WorkerGroup, slot: int, phase: tuple[str, float] | None, cause: ColocateError | None, stack: str
) -> ColocateError:
    """Return a group's error about a rank that didn't stop after a failed call, or hangs in a phase of the hold."""
    missed = f"stop within {link.grace:g} s" if phase is None else f"finish {phase[0]} within {phase[1]:g} s"
    error = RoleError(
        f"group {link.name!r} failed: slot {slot} (node {link.node(slot)}) did not {missed} "
        f"after a failed call; its stack:\n{stack}",
        group=link.name,
        rank=slot,
        node=link.node(slot),
    )
    error.__cause__ = cause
    return error


def broken_error(link: WorkerGroup, slot: int, pid: int | None, reason: str, log_tail: str) -> WorkerDied:
    return worker_error(WorkerDied, link, slot, pid, f"can't go on: {reason}", detail=reason, log_tail=log_tail or None)


def thread_error(name: str, reason: str) -> ColocateError:
    """Return the error of a group after the loss of one of the driver's threads."""
    return ColocateError(f"group {name!r} can't go on: {reason}. {OUR_FAULT}", group=name)


def death_error(link: WorkerGroup, slot: int, pid: int | None, exit: Exit, running: str | None) -> WorkerDied:
    if exit.signal is not None:
        how = f"was killed by {exit.signal}"
    elif exit.exitcode is not None:
        how = f"exited with code {exit.exitcode}"
    else:
        how = "is gone"
    doing = f" while it ran {running}" if running else ""
    why = f": {exit.detail}" if exit.detail else ""
    return worker_error(
        WorkerDied,
        link,
        slot,
        pid,
        f"{how}{doing}{why}",
        exitcode=exit.exitcode,
        signal=exit.signal,
        log_tail=exit.log_tail,
        detail=exit.detail,
        running=running,
    )


def worker_error(kind: type[E], link: WorkerGroup, slot: int, pid: int | None, what: str, **known: Any) -> E:
    """Return an error about a worker, whose text names the worker's group, process and node."""
    node = link.node(slot)
    where = f"node {node}" if pid is None else f"pid {pid}, node {node}"
    text = f"worker {slot} of group {link.name!r} ({where}) {what}"
    return kind(text, group=link.name, rank=slot, node=node, pid=pid, **known)

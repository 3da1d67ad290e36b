"""Creates the errors for worker groups that can't continue with their process groups or models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._calls.failures import unpack_exception
from colocate._calls.pending import PendingCall
from colocate._protocol.from_worker import Failure
from colocate._system.lines import replace_cells
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ColocateError, RenewalError, RoleError


def renew_error(link: WorkerGroup, slot: int, failure: Failure, body: Any, cause: ColocateError | None) -> RenewalError:
    """Return the error for a role whose `renew()` method has failed."""
    kind, text = failure.type, failure.text
    error = RenewalError(
        f"group {link.name!r} failed: renew() of role {failure.role!r} raised {kind} on slot {slot} (node "
        f"{link.node(slot)}): {text}{_cause_clause(cause)}",
        group=link.name,
        role=failure.role,
        method="renew",
        rank=slot,
        node=link.node(slot),
        remote_traceback=replace_cells(failure.traceback),
    )
    error.__cause__ = unpack_exception(link, body, kind, text)
    return error


def holders_error(link: WorkerGroup, slot: int, names: Sequence[str], cause: ColocateError | None) -> RenewalError:
    """Return the error for a role that still refers to a broken process group after the renewal."""
    prefix = f"{link.name}/"
    name = names[0].removeprefix(prefix).partition("#")[0]
    role = name.split("/")[0] if names[0].startswith(prefix) and "/" in name and name[0] != "/" else None
    holder = "a role" if role is None else f"role {role!r}"
    group_text = "torch's default group" if name == "default" else f"the process group {name!r}"
    error = RenewalError(
        f"group {link.name!r} failed: on slot {slot} {holder} still holds {group_text}, which was cut after "
        "the failed call and can't be used any more. Call ctx.process_group() in each method; if the role stores a "
        "group, a mesh or a wrapped model, give it a method renew(self) that replaces them: "
        f"colocate.torch.renew(...){_cause_clause(cause)}",
        group=link.name,
        role=role,
        rank=slot,
        node=link.node(slot),
    )
    error.__cause__ = cause
    return error


def stranded_error(link: WorkerGroup, call: PendingCall, done: int, left: int) -> RoleError:
    """Return the error for a call that only one of two ranks had finished when their process group was dropped."""
    return RoleError(
        f"{call.label} was withdrawn: rank {call.rank_of(done)} had done it, without waiting for rank "
        f"{call.rank_of(left)}, when their process group was dropped: who comes later would meet another call's "
        "operations there. Wait for an operation in the call that begins it",
        group=link.name,
        role=call.role or None,
        method=call.method,
        called_at=call.called_at,
    )


def diverged_error(
    link: WorkerGroup, call: PendingCall, updates: Mapping[int, int], cause: ColocateError | None
) -> RenewalError:
    """Return the error for ranks that have made different numbers of updates of shared weights."""
    counts = ", ".join(
        f"rank {call.rank_of(slot)} {step_events // 2}{' and a part of one' if step_events % 2 else ''}"
        for slot, step_events in updates.items()
    )
    error = RenewalError(
        f"group {link.name!r} failed: its ranks have no common state any more. In {call.label}, which failed, their "
        f"optimizers have made different numbers of updates: {counts}. What they had in common last is in a "
        f"checkpoint, "
        f'if there is one: spawn(on_failure="restart") goes back to it{_cause_clause(cause)}',
        group=link.name,
        role=call.role or None,
        method=call.method,
        called_at=call.called_at,
    )
    error.__cause__ = cause
    return error


def _cause_clause(cause: ColocateError | None) -> str:
    return "" if cause is None else f" (after: {cause.message})"

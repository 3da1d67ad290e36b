"""Deliberately broken builds, which the suite must catch: patches that an environment variable selects.

A driver applies its patch at the start, a worker before the first role is constructed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "COLOCATE_CHAOS_MUTANT"
_applied: set[str] = set()


def apply_from_environment() -> None:
    """Apply the patch that the environment names to this process, once."""
    name = os.environ.get(VARIABLE)
    if name and name not in _applied:
        _applied.add(name)
        globals()[name]()


def skipped_kill() -> None:
    """A worker that doesn't exit isn't killed."""
    from colocate.keeper.process import WorkerProcess

    _replace(WorkerProcess, "kill", lambda self: None)


def unfreed_reservation() -> None:
    """Released slots stay reserved."""
    from colocate_local.machine import Machine

    _replace(Machine, "release", lambda self, reservation: None)


def swallowed_error() -> None:
    """A role's exception is reported as the result None."""
    from colocate._protocol.from_worker import CallEnded
    from colocate.worker.runner import Runner

    def failed(self: Any, seq: int, keep: int | None, role: str | None, error: BaseException, work: Any = None) -> None:
        self._worker_context.send_message(CallEnded(seq, None, 0.0, 0.0, None))

    _replace(Runner, "_report_failure", failed)


def unresolved_future() -> None:
    """The pending calls of a group that fails, or is closed, never get an error."""
    from colocate._calls.order import CallOrder

    def fail_all(self: Any, error: BaseException) -> bool:
        with self.lock:
            found = bool(self.pending)
            self.pending.clear()
            return found

    _replace(CallOrder, "fail_all", fail_all)


def stale_pairing() -> None:
    """Process groups outlive a failed call, in which a waiting rank may pair with the next call's ranks."""
    from colocate.features.process_groups.driver import HoldState

    _replace(HoldState, "broken_groups", lambda self: [])


def unrenewed_model() -> None:
    """A model whose process groups were cut is neither renewed nor reported."""
    from colocate.features.process_groups.groups import ProcessGroups
    from colocate.worker.serving.role_instance import RoleInstance

    hook = RoleInstance.call_hook
    _replace(RoleInstance, "call_hook", lambda self, name, *args: None if name == "renew" else hook(self, name, *args))
    _replace(ProcessGroups, "take_holders", lambda self: [])


def uncounted_updates() -> None:
    """A group whose ranks have made different numbers of updates continues."""
    from colocate.features.process_groups import driver

    _replace(driver, "find_diverged", lambda hold: None)


def lost_byte() -> None:
    """Memory that comes back from a file has another last byte."""
    from colocate._system.room import SpillFile

    read = SpillFile.read_into

    def short(self: Any, view: Any, start: int) -> None:
        read(self, view, start)
        view[-1:] ^= 1

    _replace(SpillFile, "read_into", short)


def unkept_budget() -> None:
    """A role that wakes evicts no other role."""
    from colocate.features.memory.turns import TurnScheduler

    _replace(TurnScheduler, "_make_room", lambda self, name, coming: None)
    _replace(TurnScheduler, "_evict_unneeded", lambda self, name: None)
    _replace(TurnScheduler, "check_budget", lambda self, role, what, more=None: None)


def half_synced() -> None:
    """A target with a part of its weights isn't stale."""
    from colocate.features.weights.weights import ReceivedWeights

    _replace(ReceivedWeights, "mark_unusable", lambda self, why: None)


def doubled_rows() -> None:
    """A stream yields each row twice."""
    from colocate.features.rows.stream import Stream

    step = Stream.__next__

    def twice(self: Any) -> Any:
        if (found := self.__dict__.pop("again", None)) is None:
            found = self.__dict__["again"] = step(self)
        return found

    _replace(Stream, "__next__", twice)


def unmissed_child() -> None:
    """A role's calls don't fail after the death of its child."""
    from colocate.features.children.worker import ChildrenOfWorker

    _replace(ChildrenOfWorker, "_check_children", lambda self, role, since=0.0, row=None: None)


def unpaused_role() -> None:
    """A paused role continues to run."""
    from colocate.features.pausing.pauses import Pauses

    _replace(Pauses, "pause_role", lambda self, role, how, timeout: None)


def lost_rows() -> None:
    """Rows that a restart has interrupted don't begin again, and their stream ends without an error."""
    from colocate.features.rows.stream import Stream

    _replace(Stream, "_resolve_rows", lambda self, call: self._arrivals.end_queue())


def unrecorded_calls() -> None:
    """A recording lacks every other call."""
    from colocate.features.recordings.files import Writer

    add, turns = Writer.add_document, itertools.count()
    _replace(
        Writer, "add_document", lambda self, pieces, length: add(self, pieces, length) if next(turns) % 2 else None
    )


def unanswered_calls() -> None:
    """A replayed call returns None."""
    from colocate.features.recordings.playing import ReplayPlayer

    _replace(ReplayPlayer, "play_value", lambda self, seen: None)


def kept_profiles() -> None:
    """A profile whose block has failed leaves its files."""
    from colocate.features.profiling.driver import _Session

    _replace(_Session, "discard_profile", lambda self: None)


def kept_stops() -> None:
    """A stopped rank whose terminal has closed stays stopped."""
    from colocate.features.debugging.driver import DebuggingOfGroup
    from colocate.features.debugging.messages import DetachTerminal

    begin = DebuggingOfGroup._add_stop

    def deaf(self: Any, worker: Any, told: Any) -> None:
        begin(self, worker, told)
        stop = self._stops[worker.slot, told.number]
        tell, stop.notify_worker = (
            stop.notify_worker,
            lambda message: None if isinstance(message, DetachTerminal) else tell(message),
        )

    _replace(DebuggingOfGroup, "_add_stop", deaf)


def _replace(owner: Any, name: str, patch: Callable[..., Any]) -> None:
    assert hasattr(owner, name), f"{owner.__name__} has no {name} any more: the mutant breaks nothing"
    setattr(owner, name, patch)

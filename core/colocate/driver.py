"""A driver's internals: runtimes, threads, files and clocks, for packages that run or watch jobs.

This module's contents may change with any version; programs only need a `Runtime` and its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from colocate import features
from colocate._api.connection import Connection, live_connections
from colocate._api.held import NodeHandle as NodeHandle
from colocate._calls.records import (
    OF_RUNS as OF_RUNS,
    CallRecord as CallRecord,
    CheckpointRecord as CheckpointRecord,
    FetchRecord as FetchRecord,
    MoveRecord as MoveRecord,
    TransferRecord as TransferRecord,
    check_observer as check_observer,
)
from colocate._plugins.strays import list_strays as list_strays
from colocate._protocol.commands import PoolStatus as PoolStatus
from colocate._protocol.message import decode_head as decode_head
from colocate._protocol.requests import Requests as Requests
from colocate._role.context import Context as Context, current
from colocate._signals.deferred import run_deferred as run_deferred
from colocate._system.abstract import listening as listening, user_of as user_of
from colocate._system.deadline import Deadline as Deadline
from colocate._system.files import (
    GrowingFile as GrowingFile,
    atomic_folder as atomic_folder,
    list_complete_folders as list_complete_folders,
    remove_folder as remove_folder,
    tidy_folder as tidy_folder,
    write_atomically as write_atomically,
)
from colocate._system.jobs import JobThread as JobThread, report_exception as report_exception
from colocate._system.limits import LEDGERS_WITHIN_S as LEDGERS_WITHIN_S, TOLD_WITHIN_S as TOLD_WITHIN_S
from colocate._system.recent import (
    RECENT_S as RECENT_S,
    Interval as Interval,
    measure_length as measure_length,
    merge_intervals as merge_intervals,
    subtract_intervals as subtract_intervals,
)
from colocate._system.room import SpillFile as SpillFile, read_free_memory as read_free_memory
from colocate._system.terminals import drawing as drawing
from colocate._system.threads import Thread as Thread

if TYPE_CHECKING:
    from colocate._api.group import ColocatedGroup as ColocatedGroup
    from colocate._api.pool import Pool as Pool
    from colocate.errors import ColocateError
    from colocate.executor import Boot, Executor
    from colocate.features.checkpoints.checkpoint import find_checkpoints as find_checkpoints
    from colocate.features.checkpoints.driver import CheckpointsOfGroup as CheckpointsOfGroup
    from colocate.features.checkpoints.saving import Saving as Saving
    from colocate.features.devices.driver import DeviceSample as DeviceSample
    from colocate.features.looking.audit import Audit as Audit, audit_strays as audit_strays
    from colocate.features.looking.glance import RecentCalls as RecentCalls
    from colocate.features.looking.idle import IdleTracker as IdleTracker, measure_idle as measure_idle
    from colocate.features.memory.tables import GroupMemory as GroupMemory, SlotMemory as SlotMemory
    from colocate.features.recordings.differences import FirstDifference as FirstDifference
    from colocate.features.recordings.driver import comparison as comparison
    from colocate.features.recordings.given import Compare as Compare, Replay as Replay
    from colocate.features.recordings.reading import load_recording as load_recording

_OF_FEATURES = {
    "Audit": "looking.audit",
    "CheckpointsOfGroup": "checkpoints.driver",
    "Compare": "recordings.given",
    "DeviceSample": "devices.driver",
    "FirstDifference": "recordings.differences",
    "GroupMemory": "memory.tables",
    "IdleTracker": "looking.idle",
    "RecentCalls": "looking.glance",
    "Replay": "recordings.given",
    "Saving": "checkpoints.saving",
    "SlotMemory": "memory.tables",
    "audit_strays": "looking.audit",
    "comparison": "recordings.driver",
    "find_checkpoints": "checkpoints.checkpoint",
    "measure_idle": "looking.idle",
    "load_recording": "recordings.reading",
}
__getattr__ = features.make_getattr(__name__, _OF_FEATURES)
running_context = current
"""Returns the context of the role code on this thread; None without role code."""


class Place(NamedTuple):
    """The slot, node and device of a worker."""

    slot: int
    node: str
    device: str


class Driver:
    """A runtime's services for packages that run or watch jobs.

    Attributes:
        executor: The executor of the runtime's workers.
        ports: The first and the last TCP port to listen on; None for any.
    """

    def __init__(self, runtime: NodeHandle[Connection]) -> None:
        self._node = runtime._node
        self._services = self._node.services
        self.executor: Executor = self._services.executor
        self.ports = self._services.ports

    def require(self, capability: type, what: str) -> None:
        """Raise `CapabilityError` if the executor lacks a capability. The error names executors that have it."""
        self._node.require(capability, what)

    @property
    def observers(self) -> Sequence[object]:
        """The observers added by `runtime.observe`."""
        return tuple(self._services.observers)

    def remove_observer(self, observer: object) -> None:
        """Remove an observer."""
        self._services.observers.remove(observer)

    def take_weights_behind(self) -> dict[str, int]:
        """Return how many source updates the weights lagged behind when they produced recent rows; reset the record.

        Each value is the largest for a role's rows since the last call of this method. The keys are metrics:
        "weights_behind", or "weights_behind/<group>.<role>" with several such roles.
        """
        parts: dict[str, Any] = {
            name: part
            for name, group in self._node.worker_groups.items()
            if (part := group.parts.get("weights")) is not None
        }
        counts = {f"{name}.{role}": count for name, part in parts.items() for role, count in part.pop_behind().items()}
        # Count all targets, also targets without new rows, so that the metric's name is the same in every step.
        if sum(len(part.updates) for part in parts.values()) == 1:
            return {"weights_behind": max(counts.values())} if counts else {}
        return {f"weights_behind/{name}": count for name, count in counts.items()}

    def watch_devices(self) -> Callable[[], None]:
        """Report the use of the groups' GPUs to observers each second. Return a function that stops the reports."""
        if "devices" not in features.FEATURES:
            return lambda: None
        stop: Callable[[], None] = features.import_module_of("devices.driver").DeviceWatch(self._node).stop_sampling
        return stop

    def set_output_handler(self, hears: Callable[[Boot, str | None, str], bool] | None) -> bool:
        """Set the callback for lines that worker processes print; None removes the callback.

        Args:
            hears: Called on the receiving thread, with the worker's boot, the role and rank that printed, if known,
                and the line; a carriage return at its end marks a line to be overwritten. The last lines of present
                workers come at once. Must not block. True hides the line.

        Returns:
            Whether the callback was set: there is one at a time.
        """
        if hears is not None and self._services.output_handler is not None:
            return False
        self._services.output_handler = hears
        if hears is not None:
            for group in tuple(self._node.worker_groups.values()):
                for worker in group.workforce.workers:
                    for line in worker.last_lines:
                        hears(worker.boot, None, line)
        return True

    def call_soon(self, job: Callable[[], object]) -> None:
        """Run a job on the observers' thread, in order with the events."""
        self._services.dispatcher.call_soon(job)

    def flush_observers(self) -> bool:
        """Wait until observers have received all events; return False if an observer hangs."""
        return self._services.flush_observers()

    def set_hang_check(self, hangs: Callable[[], bool]) -> None:
        """Set a callback for the runtime's close: if `hangs` returns true, the close doesn't wait for observers."""
        self._services.dispatcher.is_given_up = hangs

    @property
    def stack(self) -> str:
        """The stack of the observers' thread."""
        return self._services.dispatcher.stack

    def slot_of(self, group: str, role: str, rank: int) -> int:
        """Return the slot of a role's rank; if the group was closed long ago, return the rank itself."""
        return self._node.find_slot(group, role, rank)

    def places_of(self, group: str) -> list[Place]:
        """Return the places of a group's workers; an empty list if the group was closed long ago."""
        worker_group = self._node.find_worker_group(group)
        workers = () if worker_group is None else worker_group.workforce.workers
        return [Place(worker.slot, worker.boot.node, worker.boot.device) for worker in workers]

    @property
    def foresees(self) -> bool:
        """Whether the executor can report nodes that will soon leave the cluster."""
        from colocate.executor import Executor

        return type(self.executor).leaving is not Executor.leaving

    def leaving(self) -> dict[str, float | None]:
        """Return the groups' nodes that will soon leave the cluster, with deadlines (see `Executor.leaving`)."""
        used = {place.node for group in list(self._node.worker_groups) for place in self.places_of(group)}
        return {node: until for node, until in self.executor.leaving().items() if node in used}

    def glance(self, recent: RecentCalls) -> list[dict[str, Any]]:
        """Return the current state of the groups, as plain data."""
        return list(features.import_module_of("looking.glance").describe_groups(self._node, recent))

    def stacks(self) -> list[dict[str, Any]]:
        """Return the stacks of the groups' workers, as plain data: `group`, `slot`, `node`, and `stack` as text."""
        return list(features.import_module_of("looking.glance").collect_stacks(self._node))

    def release_debuggers(self) -> None:
        """Resume the ranks that are stopped in a debugger, and prevent further stops while this runtime lives.

        This covers all groups of this process, later ones too: a job waits for each of these. Safe in a signal
        handler.
        """
        self._services.is_ending = True
        _release_all_debuggers()

    @property
    def resumed(self) -> Mapping[str, Path]:
        """The checkpoints of a resumed run. A new group starts from the checkpoint with the group's name."""
        return self._services.resumed

    @resumed.setter
    def resumed(self, folders: Mapping[str, Path]) -> None:
        self._services.resumed = folders

    def profile(self, groups: Sequence[ColocatedGroup], title: str = "", **options: Any) -> Any:
        """Return the context manager `colocate.profile` for groups; without a title, only check the arguments."""
        module = features.import_module_of("profiling.driver")
        return module.profile(groups, title=title, **options) if title else module.check_profile(groups, **options)

    @property
    def run(self) -> Any:
        """The current `Run`, for use by the packages in `colocate.features`; None without a run."""
        return self._services.run

    @run.setter
    def run(self, run: Any) -> None:
        self._services.run = run

    def mark(self, step: int) -> None:
        """Mark the end of a step in all recordings."""
        for worker_group in list(self._node.worker_groups.values()):
            part: Any = worker_group.parts.get("recordings")
            if part is not None:
                part.mark_step(step)

    def close_detached(self, name: str, force: bool) -> None:
        """End a detached pool of the cluster, also a pool that another driver detached.

        Raises:
            BorrowedError: A driver is attached (without `force`).
            ConfigError: There is no such pool.
        """
        from colocate._api.detached import close_detached

        close_detached(self._node, name, force)


def _release_all_debuggers() -> None:
    for connection in list(live_connections.values()):
        for worker_group in list(connection.worker_groups.values()):
            part: Any = worker_group.parts.get("debugging")
            if part is not None:
                part.resume_all()


def is_runtime(thing: object) -> bool:
    """Return whether an object is a runtime."""
    return isinstance(thing, NodeHandle) and isinstance(thing._node, Connection)


def checkpoints_of(group: ColocatedGroup) -> CheckpointsOfGroup:
    """Return the state of a group's checkpoints."""
    return cast("CheckpointsOfGroup", features.import_module_of("checkpoints.driver").get_checkpoints(group._node))


def regrow(group: ColocatedGroup) -> ColocateError | None:
    """Restart a shrunken group if more slots are available; return the error of calls during the restart, or None."""
    module = features.import_module_of("checkpoints.driver")
    node = group._node

    def begin() -> ColocateError | None:
        return module.start_resize(node) if module.has_more_slots(node) else None

    is_short = node.size < len(node.all_indices) and checkpoints_of(group).checkpoint is not None
    return begin() if is_short else None


def fail(group: ColocatedGroup, error: ColocateError) -> None:
    """Fail a group with an error. The group then restarts, if restarts are allowed."""
    group._node.fail_group(error)

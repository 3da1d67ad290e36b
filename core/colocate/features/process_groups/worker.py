"""The worker's side of process groups: counts and reports operations, and renews roles after a failure."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from colocate._protocol.consequence import Consequence
from colocate._protocol.message import Message
from colocate._role.context import RowState, running_call
from colocate._role.method_spec import MethodSpec
from colocate.features.process_groups import books
from colocate.features.process_groups.groups import ProcessGroups
from colocate.features.process_groups.messages import DropGroups, GroupsDropped, JoinDefault, LeftGroups, RankReport
from colocate.features.process_groups.torch_groups import default_group_hint
from colocate.features.process_groups.updates import CallCounts, count_updates
from colocate.features.process_groups.waits import finish_works
from colocate.worker.birth.ending import RoleCode
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import WorkerFeature
from colocate.worker.lane import Work
from colocate.worker.serving import failure
from colocate.worker.serving.role_instance import RoleInstance

NAME = "process_groups"


class GroupsOfWorker(WorkerFeature):
    """The process-group feature in a worker: reports operations, and drops and renews groups after a failure.

    Attributes:
        groups: The process groups of the worker's roles.
    """

    def __new__(cls, worker_context: WorkerContext) -> GroupsOfWorker:
        """Create a `CountedGroups` if the process belongs to this worker alone."""
        return object.__new__(cls if worker_context.in_process else CountedGroups)

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self.groups = ProcessGroups(worker_context)
        self._has_default = False  # Whether a role needs the default group from the start.
        self._role_code = RoleCode(worker_context.in_process)
        worker_context.scope.add_ender(self._end_waits)
        if worker_context.scope.closed is not None:
            self.groups.on_ending()

    def _end_waits(self, concerns: Callable[[int], bool], reason: str) -> None:
        self.groups.end_waits(concerns, reason)
        if self._worker_context.scope.closed is not None:
            self.groups.on_ending()

    def configure(self, plain: Any) -> None:
        """Make the default group at the start, and set torchrun's environment variables if requested."""
        self._has_default = True
        self.groups.ensure_default()
        if plain:
            os.environ.update(self.groups.torchrun_environment(plain))

    def on_message(self, message: Message, body: Any) -> None:
        """Handle a driver's message about another rank, broken groups, or the default group."""
        match message:
            case LeftGroups():
                self.groups.on_peer_left(message.number, message.slot, message.operations)
            case DropGroups():
                # All ranks are back, so only the roles' `renew` can wait now.
                self._worker_context.scope.resume_waits()
                self.groups.expect_drop(message.names)
                self._worker_context.lane.run_action(partial(self._drop_groups, message))
            case JoinDefault():
                self.groups.default.on_join_request()
            case _:
                raise AssertionError(message)

    def _drop_groups(self, message: DropGroups) -> None:
        worker_context = self._worker_context
        if message.names:
            self.groups.drop_groups(message.names)
        failed_call, body = None, None
        name: str | None = None
        try:
            if self._has_default:
                self.groups.ensure_default()
            for role in list(worker_context.roles.values()):
                name = role.name
                if name in worker_context.background:  # Background roles have no groups, and may be in a call now.
                    continue
                if name is not None and (message.everybody or self.groups.concerns_role(message.names, name)):
                    with worker_context.keep_awake(role, "process groups were dropped"), self._role_code:
                        role.call_hook("renew")
                        worker_context.device.finish_call(f"{name}.renew")
        except BaseException as error:
            error = self.explain_failure(error, name)
            failed_call, body = failure.describe_failure(
                error, worker_context.codec, worker_context.definitions, name, False
            )
        holders = self.groups.take_holders()
        if failed_call is None and not holders:
            self.groups.on_renewed()
        worker_context.send_message(GroupsDropped(message.number, holders, failed_call), body)

    def unblock_lane(self, waits: Callable[[], bool]) -> None:
        """Cut (abort) all process groups in use if this rank may be waiting for peers."""
        self.groups.cut_all(waits)

    def hold_report(self, hold: int) -> tuple[Any, ...] | None:
        """Return the number of operations on each group, and the names of cut groups."""
        operations, cuts = self.groups.enter_hold(hold)
        return RankReport(operations=operations, cuts=cuts).encode()

    def failure_report(self, error: BaseException, work: Work | None) -> tuple[Any, ...] | None:
        """Return the number of operations on each group, and whether the call failed in the middle of a step."""
        # A model on a single rank starts no counted operations, but may be in the middle of a step.
        in_step = work is not None and books.has_groups() and is_in_backward(error)
        return RankReport(operations=self.groups.operations_by_group(), in_step=in_step).encode()

    def is_consequence(self) -> bool:
        """Return whether a failure of this rank is only the consequence of a lost peer."""
        return self.groups.has_lost_peer()

    def explain_failure(self, error: BaseException, role: str | None, row: RowState | None = None) -> BaseException:
        """Add a hint to an error that is about torch's default group, and return the error."""
        if (hint := default_group_hint(error)) is not None:
            failure.add_note(error, hint)
        return error

    def wait_for_writers(self) -> None:
        """Wait for operations that role code has started without waiting for the end."""
        finish_works()

    def device_bytes(self) -> Mapping[str, int]:
        """Return the bytes of device memory that the groups' communicators use, if known."""
        size = books.communicator_bytes()
        return {} if size is None else {"nccl": size}

    def close(self) -> None:
        """Drop all groups at the worker's end."""
        self.groups.close()


class CountedGroups(GroupsOfWorker):
    """The process-group feature in a worker with a separate process, where operations and updates are counted."""

    def __init__(self, worker_context: WorkerContext) -> None:
        super().__init__(worker_context)
        # For each call on the main lane, by number, the count of operations on process groups.
        self._calls = {seq: CallCounts() for seq in list(worker_context.lane.running)}

    def on_module_imported(self) -> None:
        """Start to record groups and optimizer steps. Called when torch was imported."""
        self.groups.watch_collectives()
        count_updates(self._running_counts, self.groups.count_operations)

    def _running_counts(self) -> CallCounts | None:
        """Return the counts of the current thread's call, or None if the thread runs a row or no call."""
        call: Any = running_call.get() or self._worker_context.lane.get_last_work()
        return None if call is None or isinstance(call, RowState) else self._calls.get(call.seq)

    def before_call(self, seq: int, role: RoleInstance, spec: MethodSpec) -> None:
        """Record the counts before a call."""
        # Calls of background roles don't count, because operations are counted per process.
        if role.name not in self._worker_context.background:
            operations = books.count_all()
            self._calls[seq] = CallCounts(operations, self.groups.cut_count, role.parts.get(NAME, 0) - operations)

    def call_report(self, work: Work, role: RoleInstance) -> Mapping[str, Any] | None:
        """Return how many updates of shared weights a call has made, and whether the call has started operations.

        Raises:
            Consequence: Groups were cut while the call used them.
        """
        counts = self._calls.get(work.seq)
        if counts is None:
            return None
        operations = books.count_all()
        if operations != counts.operations:
            role.parts[NAME] = max(role.parts.get(NAME, 0), counts.before + operations)
            if self.groups.cut_count != counts.cuts:
                raise Consequence(
                    f"process groups were cut while {work.label} used them: what it has got of them isn't true"
                )
        elif not counts.step_events:  # Most calls end here: there were no operations and no updates.
            del self._calls[work.seq]
            return None
        plain = RankReport(
            self._calls.pop(work.seq).shared_updates(operations), begins=operations != counts.operations
        ).encode()
        return None if plain is None else {NAME: plain}

    def failure_report(self, error: BaseException, work: Work | None) -> tuple[Any, ...] | None:
        """Return the report of the base class, with the updates of the failed call."""
        plain = super().failure_report(error, work)
        counts = None if work is None else self._calls.pop(work.seq, None)
        if work is None or counts is None:
            return plain
        begun = books.count_all()
        work.role.parts[NAME] = max(work.role.parts.get(NAME, 0), counts.before + begun)
        report = RankReport(*plain or ())
        in_step = report.in_step or begun != counts.operations
        return report._replace(updates=counts.shared_updates(begun), in_step=in_step).encode()

    def hold_report(self, hold: int) -> tuple[Any, ...] | None:
        """Return the report of the base class, and drop the counts of calls that no longer run."""
        running = self._worker_context.lane.running
        self._calls = {seq: counts for seq, counts in self._calls.items() if seq in running}
        return super().hold_report(hold)


def is_in_backward(error: BaseException) -> bool:
    """Return whether an error, or a cause of the error, was raised in a backward pass of torch.

    DDP accepts no other step until it has all gradients of the pass.
    """
    cause: BaseException | None = error
    visited: set[int] = set()
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        frames = (frame for frame, _ in traceback.walk_tb(cause.__traceback__))
        if any(frame.f_globals.get("__name__") == "torch.autograd.graph" for frame in frames):
            return True
        cause = cause.__cause__ or cause.__context__
    return False

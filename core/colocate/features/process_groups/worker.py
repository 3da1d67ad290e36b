"""Process groups, a worker's half: what its roles have begun on them is counted, told, and renewed after a hold."""

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
from colocate.features.process_groups.messages import DropGroups, GroupsDropped, Join, Left, Told
from colocate.features.process_groups.torch_groups import hint_for
from colocate.features.process_groups.updates import Counts, count_updates
from colocate.features.process_groups.waits import finish_works
from colocate.worker.birth.ending import RoleCode
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import OfWorker
from colocate.worker.lane import Work
from colocate.worker.serving import failure
from colocate.worker.serving.role_instance import RoleInstance

NAME = "process_groups"


class GroupsOfWorker(OfWorker):
    """The process groups of a worker's roles.

    Attributes:
        groups: They.
    """

    def __new__(cls, worker_context: WorkerContext) -> GroupsOfWorker:
        """Make the half of a worker: operations are counted only where the process is one worker's."""
        return object.__new__(cls if worker_context.in_process else CountedGroups)

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self.groups = ProcessGroups(worker_context)
        self._has_default = False  # whether a role wants the default group to be there, though it may never ask for it
        self._role_code = RoleCode(worker_context.in_process)
        worker_context.scope.ends(self._end_waits)
        if worker_context.scope.closed is not None:
            self.groups.ending()

    def _end_waits(self, concerns: Callable[[int], bool], reason: str) -> None:
        self.groups.end_waits(concerns, reason)
        if self._worker_context.scope.closed is not None:
            self.groups.ending()

    def given(self, plain: Any) -> None:
        """Have the default group be there, and torchrun's environment, if that is asked for."""
        self._has_default = True
        self.groups.have_default()
        if plain:
            os.environ.update(self.groups.torchrun_environment(plain))

    def heard(self, message: Message, body: Any) -> None:
        """Hear of other ranks, or what is of no use any more."""
        match message:
            case Left():
                self.groups.left(message.number, message.slot, message.operations)
            case DropGroups():
                self._worker_context.scope.resume()  # all are back: what waits from now on is a role's `renew`
                self.groups.about_to_drop(message.names)
                self._worker_context.lane.do(partial(self._renew, message))
            case Join():
                self.groups.default.asked_to_join()
            case _:
                raise AssertionError(message)

    def _renew(self, message: DropGroups) -> None:
        """Drop process groups that are of no use, and tell the roles that have to do with them, or all."""
        worker_context = self._worker_context
        if message.names:
            self.groups.drop(message.names)
        told, body = None, None
        name: str | None = None
        try:
            if self._has_default:
                self.groups.have_default()
            for role in list(worker_context.roles.values()):
                name = role.name
                if name in worker_context.background:  # it has none, and may be amid a call
                    continue
                if name is not None and (message.everybody or self.groups.concerns(message.names, name)):
                    with worker_context.awake(role, "process groups were dropped"), self._role_code:
                        role.call_hook("renew")
                        worker_context.device.end(f"{name}.renew")
        except BaseException as error:
            error = self.blamed(error, name)
            told, body = failure.failed(error, worker_context.codec, worker_context.definitions, name, False)
        holders = self.groups.holders()
        if told is None and not holders:
            self.groups.renewed()
        worker_context.say(GroupsDropped(message.number, holders, told), body)

    def frees(self, waits: Callable[[], bool]) -> None:
        """Cut all groups in use, if this rank may wait for its peers."""
        self.groups.cut(waits)

    def back(self, hold: int) -> tuple[Any, ...] | None:
        """Return what was begun on each group, and which are cut."""
        operations, cuts = self.groups.back(hold)
        return Told(operations=operations, cuts=cuts).plain()

    def halts(self, error: BaseException, work: Work | None) -> tuple[Any, ...] | None:
        """Return what was begun on each group, and whether ranks may be in the middle of a step."""
        # Models of one rank only are in the middle of a step, too, though it has begun nothing that anybody counts.
        in_step = work is not None and books.are_any() and is_in_backward(error)
        return Told(operations=self.groups.operations(), in_step=in_step).plain()

    def is_consequence(self) -> bool:
        """Return whether a peer is lost."""
        return self.groups.lost_a_peer()

    def blamed(self, error: BaseException, role: str | None, row: RowState | None = None) -> BaseException:
        """Have an error say what to do, where somebody wants to make the default group."""
        if (hint := hint_for(error)) is not None:
            failure.note(error, hint)
        return error

    def settles(self) -> None:
        """Wait for operations that were begun, and that somebody is to wait for later."""
        finish_works()

    def of_device(self) -> Mapping[str, int]:
        """Return what the groups' communicators have."""
        found = books.nbytes()
        return {} if found is None else {"nccl": found}

    def close(self) -> None:
        """Drop all groups."""
        self.groups.close()


class CountedGroups(GroupsOfWorker):
    """The process groups of a worker that has its process to itself: operations and updates are counted."""

    def __init__(self, worker_context: WorkerContext) -> None:
        super().__init__(worker_context)
        # By the call, of those that run on the main lane; what runs now has torch's groups from now on.
        self._calls = {seq: Counts() for seq in list(worker_context.lane.running)}

    def came(self) -> None:
        """Know, as torch is there, all groups of the process, and count what optimizers do."""
        self.groups.watch_collectives()
        count_updates(self._running, self.groups.count)

    def _running(self) -> Counts | None:
        """Return what is counted of the call that a thread works for, if anything: of a row, nothing is."""
        call: Any = running_call.get() or self._worker_context.lane.last()
        return None if call is None or isinstance(call, RowState) else self._calls.get(call.seq)

    def enters(self, seq: int, role: RoleInstance, spec: MethodSpec) -> None:
        """Note what was begun before a call."""
        if role.name not in self._worker_context.background:  # all groups of a process are counted together
            operations = books.count()
            self._calls[seq] = Counts(operations, self.groups.cuts, role.parts.get(NAME, 0) - operations)

    def finished(self, work: Work, role: RoleInstance) -> Mapping[str, Any] | None:
        """Return how many updates a call has made of what ranks share, and whether it has begun operations.

        Raises:
            Consequence: Groups were cut while the call used them.
        """
        counts = self._calls.get(work.seq)
        if counts is None:
            return None
        operations = books.count()
        if operations != counts.operations:
            role.parts[NAME] = max(role.parts.get(NAME, 0), counts.before + operations)
            if self.groups.cuts != counts.cuts:
                raise Consequence(
                    f"process groups were cut while {work.label} used them: what it has got of them isn't true"
                )
        elif not counts.step_events:  # as often
            del self._calls[work.seq]
            return None
        plain = Told(self._calls.pop(work.seq).updates(operations), begins=operations != counts.operations).plain()
        return None if plain is None else {NAME: plain}

    def halts(self, error: BaseException, work: Work | None) -> tuple[Any, ...] | None:
        """Return that, and how many updates the call that failed had made."""
        plain = super().halts(error, work)
        counts = None if work is None else self._calls.pop(work.seq, None)
        if work is None or counts is None:
            return plain
        begun = books.count()
        work.role.parts[NAME] = max(work.role.parts.get(NAME, 0), counts.before + begun)
        told = Told(*plain or ())
        in_step = told.in_step or begun != counts.operations
        return told._replace(updates=counts.updates(begun), in_step=in_step).plain()

    def back(self, hold: int) -> tuple[Any, ...] | None:
        """Return what was begun, and forget calls that were put back."""
        running = self._worker_context.lane.running
        self._calls = {seq: counts for seq, counts in self._calls.items() if seq in running}
        return super().back(hold)


def is_in_backward(error: BaseException) -> bool:
    """Whether an error, or what it comes from, was raised in a backward pass of torch's.

    DDP counts there which gradients it has seen: until it has all of them, it takes up no other step.
    """
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        frames = (frame for frame, _ in traceback.walk_tb(each.__traceback__))
        if any(frame.f_globals.get("__name__") == "torch.autograd.graph" for frame in frames):
            return True
        each = each.__cause__ or each.__context__
    return False

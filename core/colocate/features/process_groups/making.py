"""Makes process groups on separate threads, while the lane waits and can be called back (stopped from waiting).

A lane that is called back stops waiting, but the rank isn't back until the group exists on all ranks, or can't exist
any more (`meetings`). So the next attempt finds no group that is half made or appears later.

Torch's default group over the slots of a group contains the groups of all roles. All slots make it together as soon as
a role asks for any group, on separate threads. Slots with roles that don't ask take part, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

import attrs

from colocate._protocol.consequence import Consequence, GroupNotCreated
from colocate._protocol.questions import JoinRendezvous
from colocate._system.jobs import format_error, get_message
from colocate._system.limits import GROUPS_CONNECT_WITHIN_S
from colocate._system.threads import Thread
from colocate.errors import ColocateError, ConfigError
from colocate.features.process_groups import books, torch_groups
from colocate.features.process_groups.meetings import GroupNotMade, report_failure, wait_all_ready, withdraw_rank
from colocate.features.process_groups.messages import DefaultStarted
from colocate.features.process_groups.torch_groups import ProcessGroupPlan
from colocate.features.process_groups.waits import destroy_later
from colocate.worker.context import WorkerContext

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_OF_PEERS = RuntimeError, GroupNotMade, Consequence  # Torch raises a RuntimeError for a lost peer.


@attrs.define(eq=False)
class RoleGroup:
    """A process group of a role, and the number of the last call that asked for the group (`seq`)."""

    group: ProcessGroup
    seq: int | None = None


@attrs.frozen
class GroupRequest:
    """A request to make a process group together with other ranks. Either all ranks get the group or none."""

    key: str  # The process group's key in `groups`.
    plan: ProcessGroupPlan
    address: tuple[str, int]  # The address of the store where the ranks meet.
    groups: dict[str, RoleGroup]  # All process groups of the worker, by name.


@attrs.define(eq=False)
class _Wait:
    """The wait of a lane, or of a role's thread, for a group."""

    seq: int  # The number of the waiting call.
    over: Future[None]  # This future completes when the group is made or has failed.
    # If the wait is called back, the rank withdraws from this group, and isn't back until `over` completes.
    group: GroupRequest | None
    # This future ends the wait. The result is the reason if the wait was called back, otherwise None.
    departure: Future[str | None] = attrs.field(factory=Future)


class GroupMaker:
    """Makes groups on separate threads, because torch waits for all ranks and the lane must be able to stop waiting.

    Attributes:
        failed_in: The last call in which a group couldn't be made because another rank had left or died; -1 for none.
    """

    def __init__(self, worker: WorkerContext) -> None:
        """Start without any group. The lane of `worker` waits for groups."""
        self._worker = worker
        self._lock = threading.Lock()
        self._unfinished: list[str] = []
        # The groups in the making, by rendezvous key. A future completes when the group is made or has failed.
        self._running: dict[str, Future[None]] = {}
        self._waiting: set[_Wait] = set()
        self._departed: list[Future[None]] = []
        self._is_abandoned: Future[None] = Future()
        # The reasons of failures, by rendezvous key. After a failure no rank makes a group under this key.
        self._on_failure: dict[str, str] = {}
        self.failed_in = -1

    @contextlib.contextmanager
    def track_unfinished(self, name: str) -> Iterator[None]:
        """A context manager that marks a group as half made: torch knows the group, but no operation has started."""
        with self._lock:
            self._unfinished.append(name)
        try:
            yield
        finally:
            with self._lock:
                self._unfinished.remove(name)

    def list_unfinished(self) -> set[str]:
        """Return the names of half-made groups."""
        with self._lock:
            return set(self._unfinished)

    def ensure_group(self, group: GroupRequest) -> None:
        """Make a group unless there is one, and wait for the result. Called on the lane or on a thread of a role.

        Raises:
            Consequence: This wait was called back, or another rank has left.
            Exception: The group couldn't be made.
        """
        rendezvous_key = group.plan.rendezvous_key
        with self._lock:
            if group.key in group.groups:  # Another thread has just made the group.
                return
            if (why := self._on_failure.get(rendezvous_key)) is not None:  # A role asks again after a failure.
                raise ConnectionError(f"process group {group.plan.name!r} could not be made before: {why}")
            begins = rendezvous_key not in self._running
            over = self._running.setdefault(rendezvous_key, Future())
        self.wait_until_over(over, group, begins)

    def wait_until_over(self, over: Future[None], group: GroupRequest | None = None, begins: bool = False) -> None:
        """Wait until a group is made. If `begins` is True, start to make the group first.

        Raises:
            Consequence: The wait was called back, so this rank withdraws from the group.
            Exception: The group couldn't be made.
        """
        wait = _Wait(self._worker.get_current_seq() or 0, over, group)
        with self._lock:
            self._waiting.add(wait)
        over.add_done_callback(lambda over: self._end_wait(wait, over.exception()))
        try:
            reason = self._worker.get_wait_refusal()
            if group is not None and begins:
                if reason is None:
                    # Use a thread, because torch waits for peers, and a peer that a hold calls back may never finish.
                    self._start_thread(group, over, leaves=False)
                else:
                    self._on_over(group, over, Consequence(reason))
            elif reason is not None:
                self._release_waits([wait], reason)
            reason = wait.departure.result()
        except GroupNotMade as error:
            raise GroupNotCreated(str(error)) from None
        finally:
            with self._lock:
                self._waiting.remove(wait)
        if reason is not None:
            raise Consequence(reason)

    def _start_thread(self, group: GroupRequest, over: Future[None], leaves: bool) -> None:
        target = self._withdraw_group if leaves else self._make_group
        try:
            Thread(target=target, args=(group, over), name="colocate-process-group").start()
        except RuntimeError as error:  # The process can't start more threads.
            self._on_over(group, over, error)

    def _make_group(self, group: GroupRequest, over: Future[None]) -> None:
        plan, store = group.plan, None
        try:
            store = torch_groups.connect_store(group.address, plan.timeout_s)
            if not wait_all_ready(store, plan.rendezvous_key, plan.index, len(plan.slots)):
                raise GroupNotCreated(f"another rank doesn't make the process group {plan.name!r}")
            with self.track_unfinished(plan.name):
                # Store the only reference to the group, so that the group can be dropped.
                group.groups[group.key] = RoleGroup(plan.make_group(store))
        except Exception as error:
            self._on_over(group, over, error)
            if store is not None:  # Notify peers last, because a notified peer fails and then calls this rank back.
                report_failure(store, plan.rendezvous_key)
        else:
            self._on_over(group, over, None)
        finally:
            del store  # Otherwise the traceback of an error would keep a reference to the store.

    def _withdraw_group(self, group: GroupRequest, over: Future[None]) -> None:
        try:
            store = torch_groups.connect_store(group.address, GROUPS_CONNECT_WITHIN_S)
            is_made = withdraw_rank(store, group.plan.rendezvous_key)
        except RuntimeError as error:  # The store no longer exists, so no rank can be waiting at the store.
            self._on_over(group, over, error)
        else:
            if not is_made:
                self._on_over(group, over, Consequence("it was left"))

    def _on_over(self, group: GroupRequest, over: Future[None], error: Exception | None) -> None:
        rendezvous_key = group.plan.rendezvous_key
        with self._lock:
            if self._running.get(rendezvous_key) is over:
                del self._running[rendezvous_key]
                if error is not None and not isinstance(error, Consequence):
                    self._on_failure[rendezvous_key] = format_error(error)
        with contextlib.suppress(InvalidStateError):  # The future is done if the rank has withdrawn from the group.
            over.set_exception(error) if error is not None else over.set_result(None)

    def _end_wait(self, wait: _Wait, error: BaseException | None) -> None:
        with self._lock, contextlib.suppress(InvalidStateError):  # The wait was already called back.
            if error is None:
                wait.departure.set_result(None)
                return
            wait.departure.set_exception(error)
            if isinstance(error, _OF_PEERS):
                self.failed_in = wait.seq

    def end_waits(self, concerns: Callable[[int], bool], reason: str) -> None:
        """End the waits of the calls that `concerns` selects, because their peers may never come."""
        with self._lock:
            waiting = [wait for wait in self._waiting if concerns(wait.seq)]
        self._release_waits(waiting, reason)

    def _release_waits(self, waiting: Iterable[_Wait], reason: str) -> None:
        leaving: list[tuple[GroupRequest, Future[None]]] = []
        with self._lock:
            for wait in waiting:
                with contextlib.suppress(InvalidStateError):  # The wait has already ended.
                    wait.departure.set_result(reason)
                    if wait.group is not None:
                        self._departed.append(wait.over)
                        leaving.append((wait.group, wait.over))
        for group, over in leaving:
            self._start_thread(group, over, leaves=True)

    def wait_until_idle(self) -> None:
        """Wait until each group from which this rank has withdrawn is made or abandoned, or the worker ends."""
        while self._departed and not self._is_abandoned.done():
            over = self._departed[0]
            futures.wait([over, self._is_abandoned], return_when=futures.FIRST_COMPLETED)
            if over.done():
                self._departed.remove(over)
        with self._lock:
            self._on_failure.clear()

    def abandon_waits(self) -> None:
        """End `wait_until_idle` at the worker's end, because a dead peer may never come. Called on any thread."""
        with contextlib.suppress(InvalidStateError):  # This method may be called twice.
            self._is_abandoned.set_result(None)

    def close(self, within_s: float) -> None:
        """Wait at most `within_s` seconds for groups from which this rank has withdrawn, after the lane's end."""
        futures.wait(self._departed, within_s)


@attrs.define(eq=False)
class _Default:
    """A default group that exists or is being made, with the address of the slots' store.

    The store outlives a renewal of the group. Slot 0 serves the store as long as this object exists.
    """

    rendezvous_key: str
    seq: int | None  # The number of the call that needs the group; None if another slot has asked first.
    completion: Future[None] = attrs.field(
        factory=Future
    )  # This future completes when the group is made or has failed.
    address: tuple[str, int] | None = None
    store: Any = None  # This is None unless this slot serves the store.


class DefaultGroup:
    """Makes, drops and renews torch's default group in one worker.

    Attributes:
        name: The group's name in torch.
    """

    def __init__(self, worker: WorkerContext, making: GroupMaker) -> None:
        self._worker, self._making = worker, making
        self._group, self._slot = worker.boot.group, worker.boot.slot
        self.name = f"{self._group}/default"
        self._lock = threading.Lock()
        self._current: _Default | None = None
        self._former: _Default | None = None  # The group before a renewal. The next group reuses the store.
        self._is_doomed = False  # Whether the lane is about to drop the group.
        self._joins_after_drop = False
        self._epoch = 0

    def ensure_made(self) -> None:
        """Make the default group unless there is one, and wait for the result."""
        seq = self._worker.get_current_seq()
        default = self._join(seq)
        try:
            self._making.wait_until_over(default.completion)
        except GroupNotCreated:
            if default.seq == seq:
                raise
            # An earlier call or another slot started the failed attempt and gets the error, so try again.
            self._making.wait_until_over(self._join(seq).completion)

    def share(self) -> None:
        """Use the default group of the process together with other workers, which are threads of the process."""
        if self._current is None:
            torch_groups.share_default(self)
            self._current = _Default("", None)
            self._current.completion.set_result(None)

    def unshare(self) -> list[Any]:
        """Stop using the shared default group. `forget_group` describes the returned list."""
        return [] if self._current is None else torch_groups.unshare_default(self)

    def rendezvous(self) -> tuple[str, int]:
        """Return the address of torch's store on slot 0. The default group must exist."""
        now = self._current
        assert now is not None
        if now.address is None:  # With a single slot, the group was made without a store.
            now.store, now.address = torch_groups.serve_store(self._worker.boot.host, self._worker.boot.ports)
        return now.address

    def _join(self, asked: int | None) -> _Default:
        """Start this slot's part in making the default group, unless already started. Called on any thread.

        Raises:
            RuntimeError: The process can't start more threads now.
        """
        with self._lock:
            if self._current is not None:
                return self._current
            former, self._former = self._former, None
            default = self._current = _Default(self._make_key(), asked)
            if former is not None:
                default.address, default.store = former.address, former.store
        if self._worker.slots == 1:
            self._make_default(default, former)
            return default
        try:
            # Use a thread, because the lane may be in another call, and the receiving thread must not block.
            arguments = default, former
            Thread(target=self._make_default, args=arguments, name="colocate-default-group").start()
        except RuntimeError:
            with self._lock:
                self._current, self._former = None, former
            raise
        return default

    def on_join_request(self) -> None:
        """Take part in another slot's attempt to make the default group, after a pending drop of the former group."""
        with self._lock:
            if self._is_doomed:
                self._joins_after_drop = True
                return
        try:
            self._join(None)
        except RuntimeError as error:
            self._report_failure(self._make_key(), error)

    def expect_drop(self) -> None:
        """Record that the lane is about to drop the group. Called on any thread."""
        with self._lock:
            self._is_doomed = True

    def on_dropped(self, epoch: int | None) -> None:
        """Record that the lane has dropped groups. `epoch` is None if the default group wasn't dropped.

        Otherwise the next default group has this epoch. If another slot has asked for the next group in the meantime,
        this slot takes part now.
        """
        with self._lock:
            if epoch is not None:
                self._former, self._current, self._epoch = self._current, None, epoch
            joins, self._is_doomed, self._joins_after_drop = self._joins_after_drop, False, False
        if joins:
            self.on_join_request()

    def _make_key(self) -> str:
        return f"{self._group}/{self._worker.boot.generation}/{self._epoch}/default"

    def _make_default(self, default: _Default, former: _Default | None) -> None:
        rendezvous_key = default.rendezvous_key
        slots, device, timeout_s = range(self._worker.slots), self._worker.boot.device, self._worker.collective_timeout
        plan = ProcessGroupPlan(self.name, rendezvous_key, slots, self._slot, True, False, device, timeout_s)
        store, have_met = None, self._worker.slots == 1
        try:
            if former is not None:
                former.completion.exception()  # The future is already done, so this doesn't wait.
                destroy_later(books.forget_group(self.name))
            import torch.distributed as dist  # Torch may not be installed if no role uses groups.

            if dist.is_initialized():
                raise ConfigError(
                    f"slot {self._slot} of group {self._group!r} is to have a default process group that colocate "
                    "makes, but a role has made torch's default one in this process already: leave "
                    "init_process_group() to colocate, and say .on(default_group=True) for it to be there at once"
                )
            store = torch_groups.create_hash_store()
            if not have_met:
                default.address = self._meet_slots(default)
                have_met = True
                store = torch_groups.connect_store(default.address, timeout_s)
            with self._making.track_unfinished(self.name):
                plan.make_group(store)
        except BaseException as error:
            with self._lock:
                # The next request may try again if the other slots can't have finished the group.
                if self._current is default and (
                    self._worker.slots == 1 or not have_met or isinstance(error, Consequence)
                ):
                    self._current, self._former = None, default
            default.completion.set_exception(error)
            # Notify the other slots last, because a notified slot fails and then calls this slot back.
            if self._worker.slots > 1 and not isinstance(error, Consequence | GroupNotMade):
                self._report_failure(rendezvous_key, error)
            if store is not None:
                report_failure(store, rendezvous_key)
        else:
            default.completion.set_result(None)

    def _meet_slots(self, default: _Default) -> tuple[str, int]:
        """Wait until all slots are ready to make the group, and return the address of the store."""
        if self._slot == 0 and default.address is None:
            default.store, default.address = torch_groups.serve_store(self._worker.boot.host, self._worker.boot.ports)
        mine = default.address if self._slot == 0 else None
        try:
            self._worker.send_message(DefaultStarted(default.rendezvous_key))
            host, port = self._worker.ask_driver(
                JoinRendezvous(default.rendezvous_key, self._worker.slots, mine, None), apart=True
            )
        except Consequence:
            raise
        except ColocateError as error:  # Another slot can't take part.
            raise GroupNotMade(str(error)) from None
        return host, port

    def _report_failure(self, rendezvous_key: str, error: BaseException) -> None:
        """Notify the other slots why this slot can't take part, without waiting for an answer."""
        why = f"slot {self._slot} can't take part in the default group: {get_message(error)}"
        self._worker.send_message(DefaultStarted(rendezvous_key))
        self._worker.notify_driver(JoinRendezvous(rendezvous_key, self._worker.slots, None, why))

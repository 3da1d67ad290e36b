"""Makes process groups on separate threads, while the lane waits and can be called back.

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

from colocate._protocol.consequence import Consequence, Unmade
from colocate._protocol.questions import Meet
from colocate._system.jobs import error_text, message_of
from colocate._system.limits import GROUPS_CONNECT_WITHIN_S
from colocate._system.threads import Thread
from colocate.errors import ColocateError, ConfigError
from colocate.features.process_groups import books, torch_groups
from colocate.features.process_groups.meetings import NotMade, all_make, can_not, withdraw
from colocate.features.process_groups.messages import Joining
from colocate.features.process_groups.torch_groups import Plan
from colocate.features.process_groups.waits import destroy_later
from colocate.worker.context import WorkerContext

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_OF_PEERS = RuntimeError, NotMade, Consequence  # For a lost connection torch raises a RuntimeError.


@attrs.define(eq=False)
class Made:
    """A process group of a role, and the number of the last call that asked for the group (`asked`)."""

    group: ProcessGroup
    asked: int | None = None


@attrs.frozen
class Together:
    """A request to make a process group together with other ranks. Either all ranks get the group or none."""

    key: str  # The name of the group among the worker's groups.
    plan: Plan
    address: tuple[str, int]  # The address of the store where the ranks meet.
    kept: dict[str, Made]  # All groups of the worker, by name.


@attrs.define(eq=False)
class _Wait:
    """The wait of a lane, or of a role's thread, for a group."""

    asked: int  # The number of the waiting call.
    over: Future[None]  # This future completes when the group is made or has failed.
    # If the wait is called back, the rank withdraws from this group, and isn't back until `over` completes.
    group: Together | None
    # This future ends the wait. The result is the reason if the wait was called back, otherwise None.
    left: Future[str | None] = attrs.field(factory=Future)


class Making:
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
        self._left: list[Future[None]] = []
        self._gives_up: Future[None] = Future()
        # The reasons of failures, by rendezvous key. After a failure no rank makes a group under this key.
        self._failed: dict[str, str] = {}
        self.failed_in = -1

    @contextlib.contextmanager
    def half_made(self, name: str) -> Iterator[None]:
        """A context manager that marks a group as half made: torch knows the group, but no operation has started."""
        with self._lock:
            self._unfinished.append(name)
        try:
            yield
        finally:
            with self._lock:
                self._unfinished.remove(name)

    def unfinished(self) -> set[str]:
        """Return the names of half-made groups."""
        with self._lock:
            return set(self._unfinished)

    def have(self, group: Together) -> None:
        """Make a group unless there is one, and wait for the result. Called on the lane or on a thread of a role.

        Raises:
            Consequence: This wait was called back, or another rank has left.
            Exception: The group couldn't be made.
        """
        rendezvous_key = group.plan.rendezvous_key
        with self._lock:
            if group.key in group.kept:  # Another thread has just made the group.
                return
            if (why := self._failed.get(rendezvous_key)) is not None:  # A role asks again after a failure.
                raise ConnectionError(f"process group {group.plan.name!r} could not be made before: {why}")
            begins = rendezvous_key not in self._running
            over = self._running.setdefault(rendezvous_key, Future())
        self.wait_for(over, group, begins)

    def wait_for(self, over: Future[None], group: Together | None = None, begins: bool = False) -> None:
        """Wait until a group is made. If `begins` is True, start to make the group first.

        Raises:
            Consequence: The wait was called back, so this rank withdraws from the group.
            Exception: The group couldn't be made.
        """
        wait = _Wait(self._worker.asking() or 0, over, group)
        with self._lock:
            self._waiting.add(wait)
        over.add_done_callback(lambda over: self._tell(wait, over.exception()))
        try:
            reason = self._worker.why_not()
            if group is not None and begins:
                if reason is None:
                    # Use a thread, because torch waits for peers, and a peer that a hold calls back may never finish.
                    self._on_a_thread(group, over, leaves=False)
                else:
                    self._is_over(group, over, Consequence(reason))
            elif reason is not None:
                self._call_back([wait], reason)
            reason = wait.left.result()
        except NotMade as error:
            raise Unmade(str(error)) from None
        finally:
            with self._lock:
                self._waiting.remove(wait)
        if reason is not None:
            raise Consequence(reason)

    def _on_a_thread(self, group: Together, over: Future[None], leaves: bool) -> None:
        target = self._withdraw if leaves else self._make
        try:
            Thread(target=target, args=(group, over), name="colocate-process-group").start()
        except RuntimeError as error:  # The process can't start more threads.
            self._is_over(group, over, error)

    def _make(self, group: Together, over: Future[None]) -> None:
        plan, store = group.plan, None
        try:
            store = torch_groups.connect_store(group.address, plan.timeout_s)
            if not all_make(store, plan.rendezvous_key, plan.index, len(plan.slots)):
                raise Unmade(f"another rank doesn't make the process group {plan.name!r}")
            with self.half_made(plan.name):
                # Store the only reference to the group, so that the group can be dropped.
                group.kept[group.key] = Made(plan.make(store))
        except Exception as error:
            self._is_over(group, over, error)
            if store is not None:  # Notify peers last, because a notified peer fails and then calls this rank back.
                can_not(store, plan.rendezvous_key)
        else:
            self._is_over(group, over, None)
        finally:
            del store  # Otherwise the traceback of an error would keep a reference to the store.

    def _withdraw(self, group: Together, over: Future[None]) -> None:
        try:
            store = torch_groups.connect_store(group.address, GROUPS_CONNECT_WITHIN_S)
            is_made = withdraw(store, group.plan.rendezvous_key)
        except RuntimeError as error:  # The store no longer exists, so no rank can be waiting at the store.
            self._is_over(group, over, error)
        else:
            if not is_made:
                self._is_over(group, over, Consequence("it was left"))

    def _is_over(self, group: Together, over: Future[None], error: Exception | None) -> None:
        rendezvous_key = group.plan.rendezvous_key
        with self._lock:
            if self._running.get(rendezvous_key) is over:
                del self._running[rendezvous_key]
                if error is not None and not isinstance(error, Consequence):
                    self._failed[rendezvous_key] = error_text(error)
        with contextlib.suppress(InvalidStateError):  # The future is done if the rank has withdrawn from the group.
            over.set_exception(error) if error is not None else over.set_result(None)

    def _tell(self, wait: _Wait, error: BaseException | None) -> None:
        with self._lock, contextlib.suppress(InvalidStateError):  # The wait was already called back.
            if error is None:
                wait.left.set_result(None)
                return
            wait.left.set_exception(error)
            if isinstance(error, _OF_PEERS):
                self.failed_in = wait.asked

    def end_waits(self, concerns: Callable[[int], bool], reason: str) -> None:
        """End the waits of some calls with a reason, because their peers may never come."""
        with self._lock:
            waiting = [wait for wait in self._waiting if concerns(wait.asked)]
        self._call_back(waiting, reason)

    def _call_back(self, waiting: Iterable[_Wait], reason: str) -> None:
        leaving: list[tuple[Together, Future[None]]] = []
        with self._lock:
            for wait in waiting:
                with contextlib.suppress(InvalidStateError):  # The wait has already ended.
                    wait.left.set_result(reason)
                    if wait.group is not None:
                        self._left.append(wait.over)
                        leaving.append((wait.group, wait.over))
        for group, over in leaving:
            self._on_a_thread(group, over, leaves=True)

    def back(self) -> None:
        """Wait until each group from which this rank has withdrawn is made or abandoned, or the worker ends."""
        while self._left and not self._gives_up.done():
            over = self._left[0]
            futures.wait([over, self._gives_up], return_when=futures.FIRST_COMPLETED)
            if over.done():
                self._left.remove(over)
        with self._lock:
            self._failed.clear()

    def give_up(self) -> None:
        """End the waits in `back` at the worker's end, because a dead peer may never come. Called on any thread."""
        with contextlib.suppress(InvalidStateError):  # This method may be called twice.
            self._gives_up.set_result(None)

    def close(self, within_s: float) -> None:
        """Wait at most `within_s` seconds for groups from which this rank has withdrawn. The lane has ended."""
        futures.wait(self._left, within_s)


@attrs.define(eq=False)
class _Default:
    """A default group that exists or is being made, with the address of the slots' store.

    The store outlives a renewal of the group. Slot 0 serves the store as long as this object exists.
    """

    rendezvous_key: str
    asked: int | None  # The number of the call that needs the group; None if another slot has asked first.
    made: Future[None] = attrs.field(factory=Future)  # This future completes when the group is made or has failed.
    address: tuple[str, int] | None = None
    store: Any = None  # This is None unless this slot serves the store.


class DefaultGroup:
    """Makes, drops and renews torch's default group in one worker.

    Attributes:
        name: The group's name in torch.
    """

    def __init__(self, worker: WorkerContext, making: Making) -> None:
        self._worker, self._making = worker, making
        self._group, self._slot = worker.boot.group, worker.boot.slot
        self.name = f"{self._group}/default"
        self._lock = threading.Lock()
        self._now: _Default | None = None
        self._former: _Default | None = None  # The group before a renewal. The next group reuses the store.
        self._doomed = False  # Whether the lane is about to drop the group.
        self._joins_after_that = False
        self._epoch = 0

    def have(self) -> None:
        """Make the default group unless there is one, and wait for the result."""
        seq = self._worker.asking()
        default = self._join(seq)
        try:
            self._making.wait_for(default.made)
        except Unmade:
            if default.asked == seq:
                raise
            # An earlier call or another slot started the failed attempt and gets the error, so try again.
            self._making.wait_for(self._join(seq).made)

    def share(self) -> None:
        """Use the default group of the process together with other workers, which are threads of the process."""
        if self._now is None:
            torch_groups.share_default(self)
            self._now = _Default("", None)
            self._now.made.set_result(None)

    def unshare(self) -> list[Any]:
        """Stop using the shared default group. `forget` describes the returned list."""
        return [] if self._now is None else torch_groups.unshare_default(self)

    def rendezvous(self) -> tuple[str, int]:
        """Return the address of the store on slot 0. The group must exist."""
        now = self._now
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
            if self._now is not None:
                return self._now
            former, self._former = self._former, None
            default = self._now = _Default(self._board(), asked)
            if former is not None:
                default.address, default.store = former.address, former.store
        if self._worker.slots == 1:
            self._make(default, former)
            return default
        try:
            # Use a thread, because the lane may be in another call, and the receiving thread must not block.
            arguments = default, former
            Thread(target=self._make, args=arguments, name="colocate-default-group").start()
        except RuntimeError:
            with self._lock:
                self._now, self._former = None, former
            raise
        return default

    def asked_to_join(self) -> None:
        """Take part in another slot's attempt to make the default group, after a pending drop of the former group."""
        with self._lock:
            if self._doomed:
                self._joins_after_that = True
                return
        try:
            self._join(None)
        except RuntimeError as error:
            self._refuse(self._board(), error)

    def about_to_drop(self) -> None:
        """Record that the lane is about to drop the group. Called on any thread."""
        with self._lock:
            self._doomed = True

    def dropped(self, epoch: int | None) -> None:
        """Record that the lane has dropped groups. `epoch` is None if the default group wasn't dropped.

        Otherwise the next default group has this epoch. If another slot has asked for the next group in the meantime,
        this slot takes part now.
        """
        with self._lock:
            if epoch is not None:
                self._former, self._now, self._epoch = self._now, None, epoch
            joins, self._doomed, self._joins_after_that = self._joins_after_that, False, False
        if joins:
            self.asked_to_join()

    def _board(self) -> str:
        return f"{self._group}/{self._worker.boot.generation}/{self._epoch}/default"

    def _make(self, default: _Default, former: _Default | None) -> None:
        rendezvous_key = default.rendezvous_key
        slots, device, timeout_s = range(self._worker.slots), self._worker.boot.device, self._worker.collective_timeout
        plan = Plan(self.name, rendezvous_key, slots, self._slot, True, False, device, timeout_s)
        store, have_met = None, self._worker.slots == 1
        try:
            if former is not None:
                former.made.exception()  # The future is already done, so this doesn't wait.
                destroy_later(books.forget(self.name))
            import torch.distributed as dist  # Torch may not be installed if no role uses groups.

            if dist.is_initialized():
                raise ConfigError(
                    f"slot {self._slot} of group {self._group!r} is to have a default process group that colocate "
                    "makes, but a role has made torch's default one in this process already: leave "
                    "init_process_group() to colocate, and say .on(default_group=True) for it to be there at once"
                )
            store = torch_groups.hash_store()
            if not have_met:
                default.address = self._meet(default)
                have_met = True
                store = torch_groups.connect_store(default.address, timeout_s)
            with self._making.half_made(self.name):
                plan.make(store)
        except BaseException as error:
            with self._lock:
                # The next request may try again if the other slots can't have finished the group.
                if self._now is default and (self._worker.slots == 1 or not have_met or isinstance(error, Consequence)):
                    self._now, self._former = None, default
            default.made.set_exception(error)
            # Notify the other slots last, because a notified slot fails and then calls this slot back.
            if self._worker.slots > 1 and not isinstance(error, Consequence | NotMade):
                self._refuse(rendezvous_key, error)
            if store is not None:
                can_not(store, rendezvous_key)
        else:
            default.made.set_result(None)

    def _meet(self, default: _Default) -> tuple[str, int]:
        """Wait until all slots are ready to make the group, and return the address of the store."""
        if self._slot == 0 and default.address is None:
            default.store, default.address = torch_groups.serve_store(self._worker.boot.host, self._worker.boot.ports)
        mine = default.address if self._slot == 0 else None
        try:
            self._worker.say(Joining(default.rendezvous_key))
            host, port = self._worker.ask(Meet(default.rendezvous_key, self._worker.slots, mine, None), apart=True)
        except Consequence:
            raise
        except ColocateError as error:  # Another slot can't take part.
            raise NotMade(str(error)) from None
        return host, port

    def _refuse(self, rendezvous_key: str, error: BaseException) -> None:
        """Notify the other slots why this slot can't take part, without waiting for an answer."""
        why = f"slot {self._slot} can't take part in the default group: {message_of(error)}"
        self._worker.say(Joining(rendezvous_key))
        self._worker.tell(Meet(rendezvous_key, self._worker.slots, None, why))

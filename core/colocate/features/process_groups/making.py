"""Process groups in the making, and waits of the lane for a group.

A lane that is called back leaves, but its rank isn't back until the group is made on all ranks, or is known
never to be (`meetings`): the next attempt finds nothing half made, and nothing that appears later.

Torch's default group over the slots of a group contains the groups of all roles. It is made when the first role asks
for any group, by all slots at once, off their lanes: also by slots with roles that don't ask.
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

_OF_PEERS = RuntimeError, NotMade, Consequence  # a lost connection is a RuntimeError of torch's


@attrs.define(eq=False)
class Made:
    """A role's group; `asked` is the number of the last call that asked for the group."""

    group: ProcessGroup
    asked: int | None = None


@attrs.frozen
class Together:
    """A group that a role's ranks make together: all ranks get the group, or none."""

    key: str  # the name among the worker's groups
    plan: Plan  # the group's parameters
    address: tuple[str, int]  # the address of the ranks' store
    kept: dict[str, Made]  # the worker's groups by name


@attrs.define(eq=False)
class _Wait:
    """A waiting lane, or thread of a role."""

    asked: int  # the waiting call
    over: Future[None]  # ends with the awaited group
    # The group to withdraw from when the lane leaves; the rank isn't back until the end of `over`. None for no group.
    group: Together | None
    # Ends the wait; the result is the reason if the lane has left, else None.
    left: Future[str | None] = attrs.field(factory=Future)


class Making:
    """Makes groups on separate threads, since torch waits for all ranks: the lane waits here, and can leave.

    Attributes:
        failed_in: The last call in which a group couldn't be made because another rank had left or died; -1 for none.
    """

    def __init__(self, worker: WorkerContext) -> None:
        """Start without any group. Args: worker: The worker with the waiting lane."""
        self._worker = worker
        self._lock = threading.Lock()
        self._unfinished: list[str] = []
        self._running: dict[str, Future[None]] = {}  # by rendezvous key; ends with the group
        self._waiting: set[_Wait] = set()
        self._left: list[Future[None]] = []
        self._gives_up: Future[None] = Future()
        self._failed: dict[str, str] = {}  # reasons by rendezvous key: no other rank makes a group there, either
        self.failed_in = -1

    @contextlib.contextmanager
    def half_made(self, name: str) -> Iterator[None]:
        """Mark a group as half made in the block: in torch's tables, but without any operation."""
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
        """Make a group if missing, and wait for the result. On the lane, or a thread of a role's.

        Raises:
            Consequence: The lane has left, or another rank has.
            Exception: The group couldn't be made.
        """
        rendezvous_key = group.plan.rendezvous_key
        with self._lock:
            if group.key in group.kept:  # made just now
                return
            if (why := self._failed.get(rendezvous_key)) is not None:  # a role has gone on after the failure
                raise ConnectionError(f"process group {group.plan.name!r} could not be made before: {why}")
            begins = rendezvous_key not in self._running
            over = self._running.setdefault(rendezvous_key, Future())
        self.wait_for(over, group, begins)

    def wait_for(self, over: Future[None], group: Together | None = None, begins: bool = False) -> None:
        """Wait for a group, which is started here if `begins`; a lane that leaves withdraws from the group.

        Raises:
            Consequence: The lane has left.
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
                    # Off the lane: torch waits for peers there, and a peer called back by a hold may never finish.
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
        except RuntimeError as error:  # the process can't start more threads
            self._is_over(group, over, error)

    def _make(self, group: Together, over: Future[None]) -> None:
        plan, store = group.plan, None
        try:
            store = torch_groups.connect_store(group.address, plan.timeout_s)
            if not all_make(store, plan.rendezvous_key, plan.index, len(plan.slots)):
                raise Unmade(f"another rank doesn't make the process group {plan.name!r}")
            with self.half_made(plan.name):
                group.kept[group.key] = Made(plan.make(store))  # no other reference: the group must be droppable
        except Exception as error:
            self._is_over(group, over, error)
            if store is not None:  # only now: a notified peer fails, which would call this rank back
                can_not(store, plan.rendezvous_key)
        else:
            self._is_over(group, over, None)
        finally:
            del store  # an error's traceback would keep the store

    def _withdraw(self, group: Together, over: Future[None]) -> None:
        try:
            store = torch_groups.connect_store(group.address, GROUPS_CONNECT_WITHIN_S)
            is_made = withdraw(store, group.plan.rendezvous_key)
        except RuntimeError as error:  # the store is gone, and all waits there with the store
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
        with contextlib.suppress(InvalidStateError):  # the wait was left, and the group is known never to be made
            over.set_exception(error) if error is not None else over.set_result(None)

    def _tell(self, wait: _Wait, error: BaseException | None) -> None:
        with self._lock, contextlib.suppress(InvalidStateError):  # the wait was left
            if error is None:
                wait.left.set_result(None)
                return
            wait.left.set_exception(error)
            if isinstance(error, _OF_PEERS):
                self.failed_in = wait.asked

    def end_waits(self, concerns: Callable[[int], bool], reason: str) -> None:
        """End waits for peers in some calls, with a reason: the peers may never come."""
        with self._lock:
            waiting = [wait for wait in self._waiting if concerns(wait.asked)]
        self._call_back(waiting, reason)

    def _call_back(self, waiting: Iterable[_Wait], reason: str) -> None:
        leaving: list[tuple[Together, Future[None]]] = []
        with self._lock:
            for wait in waiting:
                with contextlib.suppress(InvalidStateError):  # the wait has ended
                    wait.left.set_result(reason)
                    if wait.group is not None:
                        self._left.append(wait.over)
                        leaving.append((wait.group, wait.over))
        for group, over in leaving:
            self._on_a_thread(group, over, leaves=True)

    def back(self) -> None:
        """Wait until all groups that the lane has left are decided, or the worker ends. The lane runs nothing."""
        while self._left and not self._gives_up.done():
            over = self._left[0]
            futures.wait([over, self._gives_up], return_when=futures.FIRST_COMPLETED)
            if over.done():
                self._left.remove(over)
        with self._lock:
            self._failed.clear()

    def give_up(self) -> None:
        """Stop waiting at the worker's end, from any thread: a dead peer may never come."""
        with contextlib.suppress(InvalidStateError):  # called before
            self._gives_up.set_result(None)

    def close(self, within_s: float) -> None:
        """Wait for groups that the lane has left, at most `within_s` seconds. The lane has ended."""
        futures.wait(self._left, within_s)


@attrs.define(eq=False)
class _Default:
    """A default group, made or in the making, with the store's address.

    The store outlives a renewal of the group; slot 0 serves the store as long as this object lives.
    """

    rendezvous_key: str  # the key of the slots' rendezvous
    asked: int | None  # the call that needed the group; None for another slot's call
    made: Future[None] = attrs.field(factory=Future)  # ends with the group
    address: tuple[str, int] | None = None  # the store's address
    store: Any = None  # the store, if served by this slot


class DefaultGroup:
    """The default group of one worker.

    Attributes:
        name: The name in torch.
    """

    def __init__(self, worker: WorkerContext, making: Making) -> None:
        """Prepare without a group."""
        self._worker, self._making = worker, making
        self._group, self._slot = worker.boot.group, worker.boot.slot
        self.name = f"{self._group}/default"
        self._lock = threading.Lock()
        self._now: _Default | None = None
        self._former: _Default | None = None  # the group before a renewal; the store goes on
        self._doomed = False  # the lane will drop the group soon
        self._joins_after_that = False
        self._epoch = 0

    def have(self) -> None:
        """Make the default group if missing, and wait for the result."""
        seq = self._worker.asking()
        default = self._join(seq)
        try:
            self._making.wait_for(default.made)
        except Unmade:
            if default.asked == seq:
                raise
            # The attempt belonged to an earlier call, or another slot's call, which gets the error.
            self._making.wait_for(self._join(seq).made)

    def share(self) -> None:
        """Share the default group of the process among workers on threads."""
        if self._now is None:
            torch_groups.share_default(self)
            self._now = _Default("", None)
            self._now.made.set_result(None)

    def unshare(self) -> list[Any]:
        """Give up the shared default group; see `forget`."""
        return [] if self._now is None else torch_groups.unshare_default(self)

    def rendezvous(self) -> tuple[str, int]:
        """Return the store's address on slot 0. Requires the group."""
        now = self._now
        assert now is not None
        if now.address is None:  # a single slot needs no store to make the group
            now.store, now.address = torch_groups.serve_store(self._worker.boot.host, self._worker.boot.ports)
        return now.address

    def _join(self, asked: int | None) -> _Default:
        """Start this slot's part in making the default group, unless started; from any thread.

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
            # On a thread: the lane may be in an unrelated call, and the receiving thread must not block.
            arguments = default, former
            Thread(target=self._make, args=arguments, name="colocate-default-group").start()
        except RuntimeError:
            with self._lock:
                self._now, self._former = None, former
            raise
        return default

    def asked_to_join(self) -> None:
        """Join another slot's attempt at the default group; after a pending drop, if there is one."""
        with self._lock:
            if self._doomed:
                self._joins_after_that = True
                return
        try:
            self._join(None)
        except RuntimeError as error:
            self._refuse(self._board(), error)

    def about_to_drop(self) -> None:
        """Mark the group as about to be dropped on the lane; from any thread."""
        with self._lock:
            self._doomed = True

    def dropped(self, epoch: int | None) -> None:
        """Record a drop on the lane; with an epoch, the default group was dropped and the next one has this epoch.

        If another slot has asked for the next group meanwhile, this slot joins now.
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
                former.made.exception()  # over already: no wait
                destroy_later(books.forget(self.name))
            import torch.distributed as dist  # only users of groups have torch

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
                # The next request tries again if the other slots can't have gone on meanwhile.
                if self._now is default and (self._worker.slots == 1 or not have_met or isinstance(error, Consequence)):
                    self._now, self._former = None, default
            default.made.set_exception(error)
            # Only now: a notified slot fails, which would call this one back.
            # Otherwise the others would wait for this slot.
            if self._worker.slots > 1 and not isinstance(error, Consequence | NotMade):
                self._refuse(rendezvous_key, error)
            if store is not None:
                can_not(store, rendezvous_key)
        else:
            default.made.set_result(None)

    def _meet(self, default: _Default) -> tuple[str, int]:
        """Wait until all slots are ready to make the group; return the store's address."""
        if self._slot == 0 and default.address is None:
            default.store, default.address = torch_groups.serve_store(self._worker.boot.host, self._worker.boot.ports)
        mine = default.address if self._slot == 0 else None
        try:
            self._worker.say(Joining(default.rendezvous_key))
            host, port = self._worker.ask(Meet(default.rendezvous_key, self._worker.slots, mine, None), apart=True)
        except Consequence:
            raise
        except ColocateError as error:  # a slot that can't take part
            raise NotMade(str(error)) from None
        return host, port

    def _refuse(self, rendezvous_key: str, error: BaseException) -> None:
        """Notify the other slots of the reason why this one can't take part, without waiting for an answer."""
        why = f"slot {self._slot} can't take part in the default group: {message_of(error)}"
        self._worker.say(Joining(rendezvous_key))
        self._worker.tell(Meet(rendezvous_key, self._worker.slots, None, why))

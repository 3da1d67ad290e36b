"""Process groups that are being made, and the lane where it waits for one.

A lane that is called back leaves, but its rank isn't back before what it has left is there, on all ranks, or is known
never to be (`meetings`): who comes next finds nothing half made, and nothing that will be there later.

Torch's default group over the slots of a group, in which the groups of all roles lie, is made when the first role asks
for any of them, by all slots at once, off their lanes: also by those whose roles don't ask.
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
    """A role's group; `asked` is the number of the last call that asked for it."""

    group: ProcessGroup
    asked: int | None = None


@attrs.frozen
class Together:
    """A role's group that its ranks make together: all of them, or none."""

    key: str  # its name among the worker's groups
    plan: Plan  # how it is made
    address: tuple[str, int]  # where the store listens at which its ranks meet
    kept: dict[str, Made]  # the worker's groups by name


@attrs.define(eq=False)
class _Wait:
    """A lane that waits, or a thread of a role's."""

    asked: int  # the call that it waits in
    over: Future[None]  # ends with what it waits for
    # what it withdraws from when it leaves; its rank isn't back before the end of that. None for nothing
    group: Together | None
    # ends when it needn't wait any longer, with the reason if it has left
    left: Future[str | None] = attrs.field(factory=Future)


class Making:
    """What is made by threads of its own, as torch waits for all ranks: the lane waits here, and can leave.

    Attributes:
        failed_in: The last call in which a group couldn't be made, as another rank had left, or died; -1 for none.
    """

    def __init__(self, worker: WorkerContext) -> None:
        """Nothing is made yet. Args: worker: Whose lane waits."""
        self._worker = worker
        self._lock = threading.Lock()
        self._unfinished: list[str] = []
        self._running: dict[str, Future[None]] = {}  # by rendezvous_key; each ends with what is made there
        self._waiting: set[_Wait] = set()
        self._left: list[Future[None]] = []
        self._gives_up: Future[None] = Future()
        self._failed: dict[str, str] = {}  # why, by rendezvous_key, on which no other rank makes one any more either
        self.failed_in = -1

    @contextlib.contextmanager
    def half_made(self, name: str) -> Iterator[None]:
        """A group is in torch's books meanwhile, or about to be, but nobody can have begun anything on it here."""
        with self._lock:
            self._unfinished.append(name)
        try:
            yield
        finally:
            with self._lock:
                self._unfinished.remove(name)

    def unfinished(self) -> set[str]:
        """Return the names of the groups that are half made."""
        with self._lock:
            return set(self._unfinished)

    def have(self, group: Together) -> None:
        """Have a group made, unless it is there, and wait for it. On the lane, or a thread of a role's.

        Raises:
            Consequence: The lane has left, or another rank has.
            Exception: It couldn't be made.
        """
        rendezvous_key = group.plan.rendezvous_key
        with self._lock:
            if group.key in group.kept:  # what has made it is over just now
                return
            if (why := self._failed.get(rendezvous_key)) is not None:  # and the role has gone on all the same
                raise ConnectionError(f"process group {group.plan.name!r} could not be made before: {why}")
            begins = rendezvous_key not in self._running
            over = self._running.setdefault(rendezvous_key, Future())
        self.wait_for(over, group, begins)

    def wait_for(self, over: Future[None], group: Together | None = None, begins: bool = False) -> None:
        """Wait until it is over, which begins here where `begins`; a lane that leaves withdraws from the group.

        Raises:
            Consequence: The lane has left.
            Exception: It couldn't be made.
        """
        wait = _Wait(self._worker.asking() or 0, over, group)
        with self._lock:
            self._waiting.add(wait)
        over.add_done_callback(lambda over: self._tell(wait, over.exception()))
        try:
            reason = self._worker.why_not()
            if group is not None and begins:
                if reason is None:
                    # Not on the lane, which would wait in torch: a peer that a hold has called back may never finish.
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
        what = self._withdraw if leaves else self._make
        try:
            Thread(target=what, args=(group, over), name="colocate-process-group").start()
        except RuntimeError as error:  # the process may have no more of them
            self._is_over(group, over, error)

    def _make(self, group: Together, over: Future[None]) -> None:
        plan, store = group.plan, None
        try:
            store = torch_groups.connect_store(group.address, plan.timeout_s)
            if not all_make(store, plan.rendezvous_key, plan.index, len(plan.slots)):
                raise Unmade(f"another rank doesn't make the process group {plan.name!r}")
            with self.half_made(plan.name):
                group.kept[group.key] = Made(plan.make(store))  # nothing else may refer to it
        except Exception as error:
            self._is_over(group, over, error)
            if store is not None:  # not before: a peer that is told fails, and would have this rank called back
                can_not(store, plan.rendezvous_key)
        else:
            self._is_over(group, over, None)
        finally:
            del store  # which an error's traceback would keep

    def _withdraw(self, group: Together, over: Future[None]) -> None:
        try:
            store = torch_groups.connect_store(group.address, GROUPS_CONNECT_WITHIN_S)
            made = withdraw(store, group.plan.rendezvous_key)
        except RuntimeError as error:  # the store is gone, and so is who waits there
            self._is_over(group, over, error)
        else:
            if not made:
                self._is_over(group, over, Consequence("it was left"))

    def _is_over(self, group: Together, over: Future[None], error: Exception | None) -> None:
        rendezvous_key = group.plan.rendezvous_key
        with self._lock:
            if self._running.get(rendezvous_key) is over:
                del self._running[rendezvous_key]
                if error is not None and not isinstance(error, Consequence):
                    self._failed[rendezvous_key] = error_text(error)
        with contextlib.suppress(InvalidStateError):  # it was left, and is known never to be made
            over.set_exception(error) if error is not None else over.set_result(None)

    def _tell(self, wait: _Wait, error: BaseException | None) -> None:
        with self._lock, contextlib.suppress(InvalidStateError):  # it was left
            if error is None:
                wait.left.set_result(None)
                return
            wait.left.set_exception(error)
            if isinstance(error, _OF_PEERS):
                self.failed_in = wait.asked

    def end_waits(self, concerns: Callable[[int], bool], reason: str) -> None:
        """Free this rank where it waits for its peers to make a group in some calls: they may never come."""
        with self._lock:
            waiting = [wait for wait in self._waiting if concerns(wait.asked)]
        self._call_back(waiting, reason)

    def _call_back(self, waiting: Iterable[_Wait], reason: str) -> None:
        leaving: list[tuple[Together, Future[None]]] = []
        with self._lock:
            for wait in waiting:
                with contextlib.suppress(InvalidStateError):  # it isn't waited for any more
                    wait.left.set_result(reason)
                    if wait.group is not None:
                        self._left.append(wait.over)
                        leaving.append((wait.group, wait.over))
        for group, over in leaving:
            self._on_a_thread(group, over, leaves=True)

    def back(self) -> None:
        """The lane runs nothing: wait until what it has left, if anything, is there or won't be, or the worker ends."""
        while self._left and not self._gives_up.done():
            over = self._left[0]
            futures.wait([over, self._gives_up], return_when=futures.FIRST_COMPLETED)
            if over.done():
                self._left.remove(over)
        with self._lock:
            self._failed.clear()

    def give_up(self) -> None:
        """The worker ends, from any thread: a peer that has died may be waited for without end."""
        with contextlib.suppress(InvalidStateError):  # it has been told before
            self._gives_up.set_result(None)

    def close(self, within_s: float) -> None:
        """The lane has ended: wait so long for what it has left."""
        futures.wait(self._left, within_s)


@attrs.define(eq=False)
class _Default:
    """A default group that is there or in the making, and where its store listens.

    The store goes on when the group is renewed; slot 0 serves it as long as it keeps it.
    """

    rendezvous_key: str  # what the slots meet under
    asked: int | None  # the call that it was begun for; None for another slot's
    made: Future[None] = attrs.field(factory=Future)  # ends with it
    address: tuple[str, int] | None = None  # where its store listens
    store: Any = None  # that, where this slot serves it


class DefaultGroup:
    """The default group of one worker.

    Attributes:
        name: What torch calls it.
    """

    def __init__(self, worker: WorkerContext, making: Making) -> None:
        """Make none yet."""
        self._worker, self._making = worker, making
        self._group, self._slot = worker.boot.group, worker.boot.slot
        self.name = f"{self._group}/default"
        self._lock = threading.Lock()
        self._now: _Default | None = None
        self._former: _Default | None = None  # of before it was renewed, whose store goes on
        self._doomed = False  # it will be dropped as soon as the lane comes to it
        self._joins_after_that = False
        self._epoch = 0

    def have(self) -> None:
        """Have it made, unless it is there."""
        asked = self._worker.asking()
        default = self._join(asked)
        try:
            self._making.wait_for(default.made)
        except Unmade:
            if default.asked == asked:
                raise
            # That was begun for an earlier call, or another slot's, whose error it is.
            self._making.wait_for(self._join(asked).made)

    def share(self) -> None:
        """Have that of the process, whose threads the slots are."""
        if self._now is None:
            torch_groups.share_default(self)
            self._now = _Default("", None)
            self._now.made.set_result(None)

    def unshare(self) -> list[Any]:
        """Need that no more; see `forget`."""
        return [] if self._now is None else torch_groups.unshare_default(self)

    def rendezvous(self) -> tuple[str, int]:
        """Return where its store listens, on slot 0; it is there."""
        now = self._now
        assert now is not None
        if now.address is None:  # that of a single slot needs no store
            now.store, now.address = torch_groups.serve_store(self._worker.boot.host, self._worker.boot.ports)
        return now.address

    def _join(self, asked: int | None) -> _Default:
        """Have this slot do its part in making it, if that isn't under way; from any thread.

        Raises:
            RuntimeError: The process may have no more threads just now.
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
            # Not on the lane, which may be in a call that has nothing to do with it, nor where messages are received.
            arguments = default, former
            Thread(target=self._make, args=arguments, name="colocate-default-group").start()
        except RuntimeError:
            with self._lock:
                self._now, self._former = None, former
            raise
        return default

    def asked_to_join(self) -> None:
        """Another slot makes it. It may have dropped the former one before this one has."""
        with self._lock:
            if self._doomed:
                self._joins_after_that = True
                return
        try:
            self._join(None)
        except RuntimeError as error:
            self._refuse(self._board(), error)

    def about_to_drop(self) -> None:
        """The lane will be told to drop it; from any thread."""
        with self._lock:
            self._doomed = True

    def dropped(self, epoch: int | None) -> None:
        """Note that what was to be dropped has been, on the lane; with an epoch that of the next default group, too.

        A slot that has asked for the next one meanwhile has this one join it.
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
                former.made.exception()  # it is over
                destroy_later(books.forget(self.name))
            import torch.distributed as dist  # only who asks for a group has torch

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
                # Whoever asks next tries again, where the others can't have gone on meanwhile.
                if self._now is default and (self._worker.slots == 1 or not have_met or isinstance(error, Consequence)):
                    self._now, self._former = None, default
            default.made.set_exception(error)
            # Not before: a slot that is told fails, and with that this one would be called back.
            if self._worker.slots > 1 and not isinstance(error, Consequence | NotMade):  # the others would wait for it
                self._refuse(rendezvous_key, error)
            if store is not None:
                can_not(store, rendezvous_key)
        else:
            default.made.set_result(None)

    def _meet(self, default: _Default) -> tuple[str, int]:
        """Wait until all slots are about to make it; where the store is through which they do."""
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
        """Tell the other slots why this one can't take part. It isn't waited for: there is no answer but that."""
        why = f"slot {self._slot} can't take part in the default group: {message_of(error)}"
        self._worker.say(Joining(rendezvous_key))
        self._worker.tell(Meet(rendezvous_key, self._worker.slots, None, why))

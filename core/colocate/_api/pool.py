"""`Pool`: slots reserved together, who has taken them, and the groups that users spawn there."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Literal, overload

import attrs

from colocate._api.connection import Connection
from colocate._api.graph import Held
from colocate._api.group import ColocatedGroup
from colocate._owned.owned import Making, raise_together
from colocate._plugins.needs import check_alone, check_needs
from colocate._protocol.versions import base_of
from colocate._role.budget import Budget, budgets
from colocate._role.role import RoleSpec
from colocate._signals.at_work import Section, refuse_to_wait
from colocate._signals.off_main import off_main
from colocate._system.deadline import Deadline
from colocate._system.jobs import message_of
from colocate._system.limits import (
    AVOIDED_AFTER_DEATHS,
    LOOKS_FOR_SLOTS_EVERY_S,
    REGROWN_WITHIN_S,
    REPLACED_EVERY_S,
    RESTART_ENDS_WITHIN_S,
    SLOW_EVERY_S,
    SPARED_EVERY_S,
    THREAD_ENDS_WITHIN_S,
)
from colocate._system.numbers import amount_problem, limit, name_problem, shown, variable_problem
from colocate._system.threads import Thread
from colocate._system.tracebacks import without_own_frames
from colocate._worker_group.spawn import Declared, declare, refuse_fixed
from colocate._worker_group.worker_group import Attachment, Home, WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError, ConfigError, EngineError, Mistake, PlacementError
from colocate.executor import OwnProcess, Place, Request, Reservation, Watchable
from colocate.placement import where

_log = logging.getLogger("colocate")


class _Refused(Exception):
    """Slots can't be had now."""

    def __init__(self, why: PlacementError) -> None:
        super().__init__(why.message)
        self.why = why


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """A block in which a `PlacementError` is the executor's, and is waited for."""
    try:
        yield
    except PlacementError as error:
        raise _Refused(error) from error


class Slots(Home):
    """The slots of a pool, and the worker groups on them.

    Attributes:
        connection: Of its runtime.
        request: What was asked for.
        budget: How much memory the roles of each may have.
        reservation: What the executor has given; None before, and while lost slots are reserved anew.
        places: Where its slots lie.
        spares: Where those lie that take the place of lost ones, and those that are lost and aren't replaced yet.
        taken: The worker groups on each that isn't free; replaced by another mapping when one goes.
        regrow_timeout: Seconds to wait for slots in the place of lost ones.
        epoch: How many drivers have commanded it.
        attachment: How this driver has it, if it was detached once.
        lock: Held while any of these changes.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        request: Request,
        budget: Budget,
        regrow_timeout: float = REGROWN_WITHIN_S,
        spares: int = 0,
        least: int | None = None,
    ) -> None:
        super().__init__("pool", name, connection)
        self.connection = connection
        self.request = request
        self.where = where(request)
        self.budget = budget
        self.regrow_timeout = regrow_timeout
        self.least = request.slots if least is None else least  # with how many its groups go on
        self.wanted = attrs.evolve(request, slots=request.slots + spares)  # what is reserved
        self.reservation: Reservation | None = None
        self.epoch = 1
        self.attachment: Attachment | None = None
        self.places: tuple[Place, ...] = ()
        self.spares: tuple[Place, ...] = ()
        self.taken: dict[int, tuple[WorkerGroup, ...]] = {}
        self.lock = Section()
        self._renewing = threading.Lock()  # held while lost slots are reserved anew, for all groups on them
        self._regrows_until: Deadline | None = None  # when slots are lost, and others are waited for
        self._spares_thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._deaths: Counter[str] = Counter()  # of workers, by node
        self.telling = threading.Lock()
        self.join()

    @property
    def worker_groups(self) -> list[WorkerGroup]:
        """Those on it."""
        return list(dict.fromkeys(chain.from_iterable(list(self.taken.values()))))

    def hold(self, reservation: Reservation) -> None:
        """Take the slots, or give them back at once when it has been closed meanwhile."""
        with self.lock:
            if self.closed_by is None:
                self.reservation = reservation
                self.places = reservation.places[: self.request.slots]
                self.spares = reservation.places[self.request.slots :]
                if self.spares and self._spares_thread is None:
                    keeping = Thread(target=self._keep_spares, name=f"colocate-spares-{self.name}")
                    with contextlib.suppress(RuntimeError):  # no thread is to be had: what there is will do
                        keeping.start()
                        self._spares_thread = keeping
                return
        self._give_back(reservation)
        self.check()

    def occupy(self, indices: tuple[int, ...], declared: Declared, name: str | None, restarts: int) -> WorkerGroup:
        """Put a group on slots that have to have room for it; nothing is started."""
        with self.lock:
            self.check()
            if self.reservation is None:
                raise self.unreserved()
            room = self.request.groups
            full = next((index for index in indices if len(self.taken.get(index, ())) >= room), None)
            if full is not None:
                holders = [repr(each.name) for each in self.taken[full]]
                whom = f"group {holders[0]}" if room == 1 else f"groups {' and '.join(holders)}"
                rule = "one group at a time" if room == 1 else f"{room} groups at a time (groups={room})"
                raise ColocateError(
                    f"slot {full} of pool {self.name!r} is taken by {whom}: it takes {rule}. Put the roles into one "
                    f"group, close {'the other one' if room == 1 else 'one of these'}, spawn on a part "
                    f"(pool[a:b].spawn(...)), or reserve for more: reserve(..., groups={room + 1})"
                )
            return self.place(indices, declared, name, restarts)

    def place(
        self, indices: Sequence[int], declared: Declared, name: str | None, restarts: int, generation: int = 0
    ) -> WorkerGroup:
        """Put a group on slots that have room for it; nothing is started."""
        with self.lock:
            self.check()  # another driver may have taken it: whoever closes it has all groups that were put here
            with self.connection.naming:
                name = self.connection.group_name(name)
                places = [self.places[index] for index in indices]
                services = self.connection.services
                worker_group = WorkerGroup(
                    services, self, base_of(self.epoch), indices, places, declared, name, restarts, generation
                )
                self.connection.worker_groups[name] = worker_group
            for index in indices:
                self.taken[index] = (*self.taken.get(index, ()), worker_group)
            return worker_group

    def places_for(self, worker_group: WorkerGroup) -> list[Place]:
        """Return where a group's slots lie. If the cluster has lost some, there are others in their place.

        These are spares, or are reserved: in their place, or all of the pool's anew where an executor can't do that. Of
        groups that have lost the same slots the first does so, and the others find them. What doesn't fit, or can never
        fit into the machines that are left, is waited for: others may come. So is a cluster that doesn't answer, unless
        it is this driver's own or the process that was in it has ended.
        """
        newly = any(map(self._is_lost, worker_group.indices))  # what it was without already isn't waited for again
        missing: ColocateError | None
        while True:
            with self._renewing:
                try:
                    missing = self._renew(worker_group)
                except EngineError as error:
                    if error.logs is not None or not isinstance(self.connection.services.executor, Watchable):
                        raise
                    missing = error
                is_over = not newly or (self._regrows_until is not None and self._regrows_until.is_over)
                if missing is None or (is_over and self._goes_on_with_fewer()):
                    self._regrows_until = None
                    worker_group.restarts.found()
                    lost = () if missing is None else [index for index in worker_group.whole if self._is_lost(index)]
                    worker_group.indices = [index for index in worker_group.whole if index not in lost]
                    return [self.places[index] for index in worker_group.indices]
                if self._regrows_until is None:
                    self._regrows_until = Deadline(self.regrow_timeout)
                worker_group.restarts.waits_for(missing, self.regrow_timeout)
                if self._regrows_until.is_over:
                    missing.add_note(f"that was tried for {self.regrow_timeout:g} s (regrow_timeout)")
                    raise missing
                pause_s = self._regrows_until.at_most(LOOKS_FOR_SLOTS_EVERY_S)
            worker_group.restarts.stopped_within(pause_s)
            worker_group.refuse_closed()

    def regrow(self, worker_group: WorkerGroup) -> int:
        """Return how many slots a group would have if it were restarted now."""
        executor = self.connection.services.executor
        with self._renewing:
            missing = self.request.slots - len(self.places)
            if not missing:
                self._renew(worker_group)
                return len([index for index in worker_group.whole if not self._is_lost(index)])
            with contextlib.suppress(PlacementError):  # all are reserved anew if there are as many
                request = attrs.evolve(self.request, slots=missing, timeout=REPLACED_EVERY_S)
                executor.release(executor.reserve(request))
                return self.request.slots
            return len(self.places)

    def _is_lost(self, index: int) -> bool:
        """Whether a slot isn't held, or nothing can be launched there any more."""
        if self.reservation is None or index >= len(self.places):
            return True
        return self.connection.services.executor.lost(self.places[index])

    def _goes_on_with_fewer(self) -> bool:
        """Whether there are slots for a group that may have fewer; where all were given back, reserve what there is."""
        most = self.request.slots - 1
        for slots in range(most, self.least - 1, -1) if self.reservation is None else ():
            with contextlib.suppress(_Refused), _refused():
                reserve = self.connection.services.executor.reserve
                self.hold(reserve(attrs.evolve(self.request, slots=slots, timeout=0.0)))
                break
        lost = sum(map(self._is_lost, range(self.request.slots)))
        return self.least <= self.request.slots - lost <= most

    def _renew(self, worker_group: WorkerGroup) -> PlacementError | None:
        """Have others in the place of a group's lost slots, if there are any; return why they can't be had now."""
        # By an attempt before this one, or fewer were reserved then.
        given_back = self.reservation is None or len(self.places) < self.request.slots
        lost = [index for index in worker_group.whole if given_back or self._is_lost(index)]
        for each in self.worker_groups:
            if lost and each is not worker_group and not set(lost).isdisjoint(each.indices):
                each.workforce.wait_lost()
        with self.lock:
            self.check()
            gone = ", ".join(f"{index} on {self.places[index].node}" for index in lost if index < len(self.places))
            if lost and self.attachment is not None:
                raise PlacementError(
                    f"pool {self.name!r} has lost slot {gone}; it was detached as {self.attachment.name!r}, and "
                    "such a pool isn't reserved anew"
                )
            if not given_back:
                self._avoid(worker_group)
                lost = [index for index in lost if not self._take_spare(index)]
        try:
            if lost and (given_back or not self._replace([self.places[index] for index in lost])):
                self._give_up_slots(worker_group, gone)
                self._reserve_anew()
        except _Refused as refused:
            return refused.why
        return None

    def _take_spare(self, index: int, avoided: Collection[str] = ()) -> bool:
        """Have a spare in the place of a slot, which is the spare from then on; whether there was one."""
        lost, here = self.connection.services.executor.lost, self.places[index].node

        def worse(spare: Place) -> tuple[bool, bool]:  # what lies on the machine of a lost slot may be about to be lost
            return spare.node == here, self._deaths[spare.node] >= AVOIDED_AFTER_DEATHS

        for which, spare in sorted(enumerate(self.spares), key=lambda each: worse(each[1])):
            if spare.node not in avoided and not lost(spare):
                places, spares = list(self.places), list(self.spares)
                places[index], spares[which] = spare, places[index]
                self.places, self.spares = tuple(places), tuple(spares)
                return True
        return False

    def _avoid(self, worker_group: WorkerGroup) -> None:
        """Have spares elsewhere in the place of a group's slots on nodes on which workers died again and again."""
        avoided = [node for node, deaths in self._deaths.items() if deaths >= AVOIDED_AFTER_DEATHS]
        for index in worker_group.whole if avoided and self.spares else ():
            alone = all(each is worker_group or not each.live() for each in self.taken.get(index, ()))
            if self.places[index].node in avoided and alone:
                self._take_spare(index, avoided)

    def died(self, node: str) -> str:
        """Note that a worker has died on a node; return what is to be said of that node, if anything."""
        self._deaths[node] += 1
        deaths = self._deaths[node]
        if deaths < AVOIDED_AFTER_DEATHS or len({place.node for place in (*self.places, *self.spares)}) == 1:
            return ""
        lost = self.connection.services.executor.lost
        spared = any(place.node != node and not lost(place) for place in self.spares)
        then = ", which is avoided: a spare takes its place" if spared else ""
        return f"workers of pool {self.name!r} have died {deaths} times on node {node}{then}"

    def _replace(self, lost: Sequence[Place], within_s: float = REPLACED_EVERY_S) -> bool:
        """Have the executor hold others in the place of lost slots; False where it can't.

        Raises:
            _Refused: They can't be had now.
        """
        reservation = self.reservation
        assert reservation is not None
        request = attrs.evolve(self.request, slots=len(lost), timeout=within_s)
        with _refused():
            found = self.connection.services.executor.replace(reservation, lost, request)
        if found is None:
            return False
        others = {id(before): after for before, after in zip(reservation.places, found.places, strict=True)}
        with self.lock:
            self.reservation = found
            self.places = tuple(others[id(place)] for place in self.places)
            self.spares = tuple(others[id(place)] for place in self.spares)
        return True

    def _give_up_slots(self, worker_group: WorkerGroup, gone: str) -> None:
        """Give all slots back, of which some are lost, if nothing lives on the others."""
        with self.lock:
            self.check()
            others = {each.name for each in self.worker_groups if each is not worker_group and each.live()}
            if others:
                raise PlacementError(
                    f"pool {self.name!r} has lost slot {gone}; it can't be reserved anew while group "
                    f"{', '.join(sorted(others))} lives on others of its slots"
                )
            reservation, self.reservation = self.reservation, None
        if reservation is not None:
            self.connection.services.executor.release(reservation)

    def _reserve_anew(self) -> None:
        """Reserve all slots anew, without the spares if these can't be had.

        Raises:
            _Refused: They can't be had now.
        """
        reserve, has_spares = self.connection.services.executor.reserve, self.wanted != self.request
        for request in (self.wanted, self.request) if has_spares else (self.request,):
            try:
                with _refused():
                    self.hold(reserve(attrs.evolve(request, timeout=REPLACED_EVERY_S)))
                return
            except _Refused:
                if request is self.request:
                    raise

    def _keep_spares(self) -> None:
        """Have others in the place of lost spares, until the pool is closed. On a thread of its own."""
        lost, told = self.connection.services.executor.lost, ""
        while not self._closing.wait(LOOKS_FOR_SLOTS_EVERY_S):
            try:
                with self._renewing, contextlib.suppress(_Refused):
                    if self._closing.is_set():
                        return
                    missing = [place for place in self.spares if lost(place)]
                    if missing and self.reservation is not None and not self._replace(missing, SPARED_EVERY_S):
                        return
            except ColocateError as error:  # the cluster doesn't answer, say
                words = f"pool {self.name!r} has no spare in the place of a lost one: {message_of(error)}"
                if not self._closing.is_set() and words != told:
                    self.connection.services.printer.soon(partial(_log.warning, words))
                    told = words
                self._closing.wait(SLOW_EVERY_S)

    def unreserved(self, what: str = "") -> ColocateError:
        """The error of a use while no slots are reserved for it; `what` comes of that. Its lock is held."""
        if any(worker_group.life.recovers for worker_group in self.worker_groups):
            then = "which the restart of its group does: wait for that with group.wait_ready(), or reserve another pool"
        else:
            then = "and the restart of its group, which does that, was given up: close it, and reserve another pool"
        return ColocateError(
            f"pool {self.name!r} {what}has lost slots with their node and has to be reserved anew, {then}"
        )

    def vacate(self, worker_group: WorkerGroup) -> None:
        """A group has gone: its place on its slots is free."""
        with self.lock:
            left = {
                index: tuple(each for each in there if each is not worker_group) for index, there in self.taken.items()
            }
            self.taken = {index: there for index, there in left.items() if there}
            self.forget(worker_group)
        self.changed()

    def beside(self, worker_group: WorkerGroup, slot: int) -> list[Worker]:
        """Return the workers of other groups that share a slot of a group."""
        index = worker_group.indices[slot]
        there = [each for each in self.taken.get(index, ()) if each is not worker_group and index in each.indices]
        return [each.workforce.workers[each.indices.index(index)] for each in there]

    def others(self) -> Mapping[str, WorkerGroup]:
        """The worker groups of its runtime, by name."""
        return self.connection.worker_groups

    def forget(self, worker_group: WorkerGroup) -> None:
        """Its name is free."""
        self.connection.forget(worker_group)

    # -- from driver to driver

    def goes_on(self, worker_group: WorkerGroup) -> bool:
        """Whether a group lives on when this driver lets go of it."""
        return self.attachment is not None and not self.attachment.own and worker_group.name in self.attachment.groups

    def changed(self) -> None:
        """What drivers after this one are to know of its groups has changed."""
        if self.attachment is not None:
            self.attachment.changed()

    def close_for(self, by: str, grace: float, force: bool) -> None:
        """Close it on behalf of `by`."""
        if not self.take_closing(by, force):
            return
        with self.lock:  # whoever has passed the check before is done: its group is a child, its slots are held
            self._closing.set()
        errors: list[BaseException] = []
        try:
            errors += self.close_children(grace)
        finally:
            renewed = self._renewing.acquire(timeout=RESTART_ENDS_WITHIN_S)  # what is just being replaced is held then
            try:
                if self.reservation is not None:
                    self._give_back(self.reservation)
            except Exception as error:
                errors.append(error)
            finally:
                if renewed:
                    self._renewing.release()
                if self._spares_thread is not None:
                    self._spares_thread.join(THREAD_ENDS_WITHIN_S)
                self.disown()
                self.life.end()
        raise_together(f"pool {self.name!r} was closed, and this had gone wrong", errors)

    def give_up(self, by: str) -> None:
        """Close it at once: who was making it has been interrupted. One that was to be attached goes on."""
        if self.attachment is not None:
            self.attachment.own = False
        elif self.reservation is None:
            self.connection.services.executor.withdraw(self.request)
        super().give_up(by)

    def _give_back(self, reservation: Reservation) -> None:
        executor: Any = self.connection.services.executor
        if self.attachment is None or (self.attachment.own and executor.retain(reservation)):
            executor.release(reservation)
        else:  # it goes on: it is borrowed, or another driver has taken it while it was being closed here
            executor.let_go(reservation)


@attrs.frozen
class Slot:
    """One slot of a pool.

    Attributes:
        index: Its index in the pool.
        node: Name of the machine.
        devices: Indices of its GPUs there.
        state: "free", the names of the groups that have it ("policy", "policy, judge"), or "lost", where none goes on
            with it.
    """

    index: int
    node: str
    devices: tuple[int, ...]
    state: str


@attrs.frozen(eq=False)
class PoolPart:
    """Some slots of a pool, to spawn on. A name: it owns nothing and decides no lifetime."""

    pool: Pool
    indices: tuple[int, ...]

    @property
    def slots(self) -> list[Slot]:
        """Its slots."""
        return [self.pool.slots[index] for index in self.indices]

    def spawn(
        self,
        roles: Mapping[str, RoleSpec[Any]],
        name: str | None = None,
        mesh: Mapping[str, Any] | None = None,
        on_failure: str = "fail",
        timeout: float | None = None,
        restarts: int = 3,
        restore: str | os.PathLike[str] | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        residency: Literal["swap"] | None = None,
        step: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ColocatedGroup:
        """As `Pool.spawn`, on these slots."""
        budget = Budget.of(device_memory, host_memory, "spawn() ")
        how = name, mesh, on_failure, timeout, restarts, restore, budget, residency, step, env
        return self.pool._spawn(self.indices, roles, *how)


class Pool(Held[Slots], node=Slots, by="runtime.reserve"):
    """Slots reserved together, all or none. Made by `runtime.reserve`; a context manager that closes it."""

    @property
    def slots(self) -> list[Slot]:
        """Its slots: node, devices, and the groups on each."""
        node = self._node
        found = []
        for index, place in enumerate(node.places):
            groups = ", ".join(each.name for each in node.taken.get(index, ()) if index in each.indices)
            state = groups or ("lost" if node._is_lost(index) else "free")
            found.append(Slot(index, place.node, place.devices, state))
        return found

    @property
    def groups(self) -> dict[str, ColocatedGroup]:
        """The groups on it by name."""
        return {worker_group.name: ColocatedGroup._of(worker_group) for worker_group in self._node.worker_groups}

    @property
    def spares(self) -> list[Slot]:
        """Its spares (`reserve(..., spares=1)`), with the index of none; their state is "spare" or "lost"."""
        lost = self._node.connection.services.executor.lost
        return [Slot(-1, place.node, place.devices, "lost" if lost(place) else "spare") for place in self._node.spares]

    def __len__(self) -> int:
        return len(self._node.places)

    @overload
    def __getitem__(self, key: int) -> PoolPart: ...
    @overload
    def __getitem__(self, key: slice) -> PoolPart: ...
    def __getitem__(self, key: int | slice) -> PoolPart:
        """Some of its slots, to spawn on."""
        everything = range(len(self))
        picked: Sequence[int] = everything[key] if isinstance(key, slice) else [everything[key]]
        if not picked:
            raise ConfigError(f"pool {self.name!r} has {len(self)} slots; {key!r} picks none of them")
        return PoolPart(self, tuple(picked))

    def spawn(
        self,
        roles: Mapping[str, RoleSpec[Any]],
        name: str | None = None,
        mesh: Mapping[str, Any] | None = None,
        on_failure: str = "fail",
        timeout: float | None = None,
        restarts: int = 3,
        restore: str | os.PathLike[str] | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        residency: Literal["swap"] | None = None,
        step: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ColocatedGroup:
        """Start one worker per slot and construct the roles in it; returns when every role of every rank is there.

        Args:
            roles: The roles by name, as `colocate.role(...)` declares them; constructed in this order.
            name: Name of the group, unique in the runtime.
            mesh: Mesh of the roles that live on all slots and name none of their own.
            on_failure: What happens when the group fails: "fail", or "restart": it is rebuilt in its pool, from its
                last `group.checkpoint(...)`; see `group.wait_ready`.
            timeout: Seconds that starting may take at most, also of a restart; None for no limit.
            restarts: How often it is rebuilt without a new checkpoint in between, before it fails for good.
            restore: Folder of a checkpoint to start from.
            device_memory: How much memory of each slot's device its roles may have together, as "40GiB" or in bytes;
                see `group.memory()` for what is counted. When they hold more as one is constructed or after a call,
                that fails with `MemoryBudgetError`, which says who has what.
            host_memory: How much of the host's, with what sleeps.
            residency: "swap": roles take turns. Where `device_memory` needs it, who isn't called sleeps, and wakes for
                its call. For slots that are processes.
            step: The roles in the order in which they are called, again and again, as in `("actor", "critic")`: then
                turns are planned from the first one on. By default that is found from the calls.
            env: Environment variables of its workers, on top of the pool's (`Runtime.reserve`).

        Raises:
            ConfigError: The declaration is wrong; says all mistakes.
            RoleStartError: A role could not be constructed; `errors` names each rank. Nothing is left running.
        """
        budget = Budget.of(device_memory, host_memory, "spawn() ")
        how = name, mesh, on_failure, timeout, restarts, restore, budget, residency, step, env
        return self._spawn(tuple(range(len(self))), roles, *how)

    def _spawn(
        self,
        indices: tuple[int, ...],
        roles: Mapping[str, RoleSpec[Any]],
        name: str | None,
        mesh: Mapping[str, Any] | None,
        on_failure: str,
        timeout: float | None,
        restarts: int,
        restore: str | os.PathLike[str] | None,
        budget: Budget,
        residency: Literal["swap"] | None,
        step: Sequence[str] | None,
        env: Mapping[str, str] | None,
    ) -> ColocatedGroup:
        node = self._node
        node.check()
        if (problem := name_problem(name)) is not None:
            raise ConfigError(f"spawn(name) {problem}")
        if on_failure not in ("fail", "restart"):
            raise ConfigError(f"on_failure={on_failure!r}: it is 'fail' or 'restart'")
        if (problem := amount_problem(restarts, whole=True, least=1)) is not None:
            raise ConfigError(f"spawn(restarts) {problem}; a group that isn't restarted has on_failure='fail'")
        timeout = limit(timeout, "spawn(timeout)")
        variables = environment(env, "spawn(...)")
        if variables:
            node.connection.require(OwnProcess, "set the environment of a worker (env=)")
        declared = declare(roles, len(indices), mesh)
        is_shared = node.request.groups > 1
        limits = budgets(node.budget, budget, declared.specs, residency, step, is_shared)
        if limits.swap:
            node.connection.require(OwnProcess, "have roles take turns, for which they sleep (residency=)")
        declared = attrs.evolve(declared, budgets=limits, env=variables)
        for role, info in declared.infos.items():
            spec, kind = declared.specs[role], type(node.connection.services.executor)
            check_needs(role, info.cls, spec, len(info.slots), node.request.gpus, kind)
        check_alone(declared.infos)
        if on_failure == "restart" and node.least < node.request.slots:
            refuse_fixed(declared.specs, mesh, node.least, node.request.slots)
            if len(indices) < node.request.slots:
                raise ConfigError(
                    f"pool {node.name!r} has {node.least} to {node.request.slots} slots, so that a group that is "
                    "restarted may go on with fewer: spawn it on all of them, or reserve a fixed number"
                )
        making: Making[WorkerGroup] = Making(f"spawn(name={name!r})")

        def start() -> WorkerGroup:
            worker_group = making.made(node.occupy(indices, declared, name, restarts if on_failure == "restart" else 0))
            try:
                worker_group.start(timeout, None if restore is None else Path(restore))
            except BaseException as error:
                worker_group.close_after(error, "its failed start", 0.0)
                raise
            worker_group.services.tell("colocate_group_spawned", ColocatedGroup._of(worker_group))
            return worker_group

        try:
            return making.run(start, ColocatedGroup._of)
        except ColocateError as error:  # which says itself what is wrong: not one of these frames does
            raise without_own_frames(error)  # noqa: B904 - it is the same one

    def detach(self, name: str, ttl: float) -> None:
        """Give it, with its groups, to the cluster; this driver is through with it, as if it were closed.

        Any driver of the cluster may go on with it: `runtime.attach(name)`. Residents are freed.

        Args:
            name: What it is called there; unique in the cluster.
            ttl: Seconds that it lives without a driver, from now on and from the end of each borrow. Then it ends.

        Raises:
            CapabilityError: The executor ends with its driver, and everything with it.
            ConfigError: It was reserved without `detachable=True`, or the name is taken.
            ColocateError: Calls are pending, or another group uses its residents.
        """
        refuse_to_wait(f"detaching {self._node.kind} {self.name!r}")
        detached: Any = import_module("colocate._detached")  # which nothing else of core needs
        off_main(lambda: detached.detach(self._node, name, ttl))

    def close(self, grace: float = 10.0, force: bool = False) -> None:
        """Close its groups, the newest first, and give its slots back. One that is attached without `own=True` goes on.

        Args:
            grace: Seconds that running calls have to finish; `math.inf` waits for them for ever.
            force: Close it although groups elsewhere use residents of its groups.

        Raises:
            BorrowedError: A group elsewhere uses a resident (without `force`).
            ExceptionGroup: What went wrong, after everything has been freed.
        """
        self._node.close_by_caller(grace, force)


def environment(env: Any, what: str) -> dict[str, str]:
    """Return environment variables as they were given to `what`, or raise `ConfigError` with all that is wrong."""
    given = {} if env is None else env
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} env must be a mapping from variables to values, not {shown(env)}")
    problems = {key: variable_problem(key, value) for key, value in given.items()}
    mistakes = [Mistake(f"env.{key!r}", None, why) for key, why in problems.items() if why is not None]
    if mistakes:
        raise ConfigError(f"{what} was asked for what can't be", mistakes=tuple(mistakes))
    return {key: str(value) for key, value in given.items()}

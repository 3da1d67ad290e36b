"""`Slots`: the slots of a pool with the worker groups there, and the replacement of lost slots."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import attrs

from colocate._api.connection import Connection
from colocate._owned.owned import Owned, raise_together
from colocate._protocol.versions import epoch_base
from colocate._role.budget import Budget
from colocate._signals.in_framework import Section
from colocate._system.deadline import Deadline
from colocate._system.jobs import get_message
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
from colocate._system.threads import Thread
from colocate._worker_group.spawn import Declared
from colocate._worker_group.worker_group import Attachment, WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ClusterError, ColocateError, PlacementError
from colocate.executor import Place, Request, Reservation, Watchable
from colocate.placement import describe_placement

_log = logging.getLogger("colocate")


class _SlotsRefused(Exception):
    """Raised when the executor refuses slots because they aren't available now."""

    def __init__(self, why: PlacementError) -> None:
        super().__init__(why.message)
        self.why = why


@contextlib.contextmanager
def _catch_refusal() -> Iterator[None]:
    """Convert an executor's `PlacementError` in a block into `_SlotsRefused`: refused requests are retried."""
    try:
        yield
    except PlacementError as error:
        raise _SlotsRefused(error) from error


class Slots(Owned):
    """The slots of a pool, and the worker groups on the slots.

    Attributes:
        connection: The runtime's connection.
        request: The user's request.
        budget: The memory budget of the roles on each slot.
        reservation: The executor's reservation; None before, and between release and a new reservation of lost
            slots.
        places: The places of the slots.
        spares: The places of spares, including lost slots without a replacement yet.
        groups_by_slot: The worker groups of each taken slot; replaced by another mapping when a group is closed.
        regrow_timeout: Seconds to wait for replacements of lost slots.
        epoch: The number of drivers so far.
        attachment: The terms of this driver's hold on a pool that was detached once.
        lock: Lock for all of these.
        neighbours_lock: Lock under which workers on a slot are notified of each other, in order.
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
        self.where = describe_placement(request)
        self.budget = budget
        self.regrow_timeout = regrow_timeout
        # A group on all slots needs at least this many of the slots to restart.
        self.least = request.slots if least is None else least
        self.full_request = attrs.evolve(request, slots=request.slots + spares)  # This request includes spares.
        self.reservation: Reservation | None = None
        self.epoch = 1
        self.attachment: Attachment | None = None
        self.places: tuple[Place, ...] = ()
        self.spares: tuple[Place, ...] = ()
        self.groups_by_slot: dict[int, tuple[WorkerGroup, ...]] = {}
        self.lock = Section()
        self._renewing = threading.Lock()  # Held while lost slots of any group are replaced.
        self._regrows_until: Deadline | None = None  # Set while the pool waits for replacements of lost slots.
        self._spares_thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._deaths: Counter[str] = Counter()  # The number of workers that died, by node.
        self.neighbours_lock = threading.Lock()
        self.join_owner()

    @property
    def worker_groups(self) -> list[WorkerGroup]:
        return list(dict.fromkeys(chain.from_iterable(list(self.groups_by_slot.values()))))

    def accept_reservation(self, reservation: Reservation) -> None:
        """Store the reservation, or release the slots at once if the pool has been closed meanwhile."""
        with self.lock:
            if self.closed_by is None:
                self.reservation = reservation
                self.places = reservation.places[: self.request.slots]
                self.spares = reservation.places[self.request.slots :]
                if self.spares and self._spares_thread is None:
                    keeping = Thread(target=self._maintain_spares, name=f"colocate-spares-{self.name}")
                    with contextlib.suppress(RuntimeError):  # Without a thread, lost spares aren't replaced.
                        keeping.start()
                        self._spares_thread = keeping
                return
        self._return_reservation(reservation)
        self.check_usable()

    def add_group(self, indices: tuple[int, ...], declared: Declared, name: str | None, restarts: int) -> WorkerGroup:
        """Create a group on slots, or raise ColocateError if a slot has no room. No worker is started."""
        with self.lock:
            self.check_usable()
            if self.reservation is None:
                raise self.unreserved_error()
            room = self.request.groups
            full = next((index for index in indices if len(self.groups_by_slot.get(index, ())) >= room), None)
            if full is not None:
                holders = [repr(group.name) for group in self.groups_by_slot[full]]
                whom = f"group {holders[0]}" if room == 1 else f"groups {' and '.join(holders)}"
                rule = "one group at a time" if room == 1 else f"{room} groups at a time (groups={room})"
                raise ColocateError(
                    f"slot {full} of pool {self.name!r} is taken by {whom}: a slot has room for {rule}. Put the roles "
                    f"into one group, close {'that group' if room == 1 else 'one of these'}, spawn on other slots "
                    f"(pool[a:b].spawn(...)), or reserve more room: reserve(..., groups={room + 1})"
                )
            return self.place_group(indices, declared, name, restarts)

    def place_group(
        self, indices: Sequence[int], declared: Declared, name: str | None, restarts: int, generation: int = 0
    ) -> WorkerGroup:
        """Create a group on slots that have room. No worker is started."""
        with self.lock:
            self.check_usable()  # If another driver has taken the pool, the pool is closed here.
            with self.connection.naming:
                name = self.connection.choose_group_name(name)
                places = [self.places[index] for index in indices]
                services = self.connection.services
                worker_group = WorkerGroup(
                    services, self, epoch_base(self.epoch), indices, places, declared, name, restarts, generation
                )
                self.connection.worker_groups[name] = worker_group
            for index in indices:
                self.groups_by_slot[index] = (*self.groups_by_slot.get(index, ()), worker_group)
            return worker_group

    def secure_places(self, worker_group: WorkerGroup) -> list[Place]:
        """Return places for a group's slots, with replacements for lost slots; set `indices` if the group shrinks.

        Replacements are spares, or new reservations: for the lost slots, or for the whole pool if the executor can't
        replace slots. Of several groups with the same lost slots, the first one replaces them for all. A request
        that doesn't fit, now or on the present machines, is retried until `regrow_timeout`: machines may come. So is
        a cluster that doesn't answer, unless the cluster is this driver's own or the driver's process in the cluster
        has ended.
        """
        # Wait only for newly lost slots, not for slots that the group's last restart has left out.
        newly = any(map(self._is_lost, worker_group.indices))
        missing: ColocateError | None
        while True:
            with self._renewing:
                try:
                    missing = self._replace_lost(worker_group)
                except ClusterError as error:
                    if error.logs is not None or not isinstance(self.connection.services.executor, Watchable):
                        raise
                    missing = error
                is_over = not newly or (self._regrows_until is not None and self._regrows_until.is_over)
                if missing is None or (is_over and self._reserve_fewer()):
                    self._regrows_until = None
                    worker_group.restarts.clear_missing()
                    lost = (
                        () if missing is None else [index for index in worker_group.all_indices if self._is_lost(index)]
                    )
                    worker_group.indices = [index for index in worker_group.all_indices if index not in lost]
                    return [self.places[index] for index in worker_group.indices]
                if self._regrows_until is None:
                    self._regrows_until = Deadline(self.regrow_timeout)
                worker_group.restarts.note_missing(missing, self.regrow_timeout)
                if self._regrows_until.is_over:
                    missing.add_note(f"that was tried for {self.regrow_timeout:g} s (regrow_timeout)")
                    raise missing
                pause_s = self._regrows_until.limit_wait(LOOKS_FOR_SLOTS_EVERY_S)
            worker_group.restarts.wait_stopped(pause_s)
            worker_group.check_open()

    def count_slots_now(self, worker_group: WorkerGroup) -> int:
        """Return the number of slots that a group would have after a restart now."""
        executor = self.connection.services.executor
        with self._renewing:
            missing = self.request.slots - len(self.places)
            if not missing:
                self._replace_lost(worker_group)
                return len([index for index in worker_group.all_indices if not self._is_lost(index)])
            with contextlib.suppress(PlacementError):  # A trial reservation shows whether the slots are available.
                request = attrs.evolve(self.request, slots=missing, timeout=REPLACED_EVERY_S)
                executor.release(executor.reserve(request))
                return self.request.slots
            return len(self.places)

    def _is_lost(self, index: int) -> bool:
        """Return whether a slot isn't reserved, or no worker can be launched there any more."""
        if self.reservation is None or index >= len(self.places):
            return True
        return self.connection.services.executor.is_lost(self.places[index])

    @property
    def is_replacing(self) -> bool:
        """Whether lost slots of a restarting group, or lost spares, are being replaced."""
        restarting = chain.from_iterable(group.all_indices for group in self.worker_groups if group.life.recovers)
        lost = self.connection.services.executor.is_lost
        return any(map(self._is_lost, restarting)) or (self._spares_thread is not None and any(map(lost, self.spares)))

    def _reserve_fewer(self) -> bool:
        """Return whether a group can restart on fewer slots. If none is reserved, first reserve as many as possible."""
        most = self.request.slots - 1
        for slots in range(most, self.least - 1, -1) if self.reservation is None else ():
            with contextlib.suppress(_SlotsRefused), _catch_refusal():
                reserve = self.connection.services.executor.reserve
                self.accept_reservation(reserve(attrs.evolve(self.request, slots=slots, timeout=0.0)))
                break
        lost = sum(map(self._is_lost, range(self.request.slots)))
        return self.least <= self.request.slots - lost <= most

    def _replace_lost(self, worker_group: WorkerGroup) -> PlacementError | None:
        """Replace a group's lost slots, if any. Return the executor's error if it refuses new slots, else None."""
        # True if an earlier attempt has released all slots, or has reserved only some slots.
        given_back = self.reservation is None or len(self.places) < self.request.slots
        lost = [index for index in worker_group.all_indices if given_back or self._is_lost(index)]
        for other_group in self.worker_groups:
            if lost and other_group is not worker_group and not set(lost).isdisjoint(other_group.indices):
                other_group.workforce.wait_lost()
        with self.lock:
            self.check_usable()
            lost_text = ", ".join(f"{index} on {self.places[index].node}" for index in lost if index < len(self.places))
            if lost and self.attachment is not None:
                raise PlacementError(
                    f"pool {self.name!r} has lost slot {lost_text}; it was detached as {self.attachment.name!r}, and "
                    "such a pool isn't reserved anew"
                )
            if not given_back:
                self._avoid_bad_nodes(worker_group)
                lost = [index for index in lost if not self._take_spare(index)]
        try:
            if lost and (given_back or not self._replace_places([self.places[index] for index in lost])):
                self._release_all(worker_group, lost_text)
                self._reserve_again()
        except _SlotsRefused as refused:
            return refused.why
        return None

    def _take_spare(self, index: int, avoided: Collection[str] = ()) -> bool:
        """Swap a slot with a usable spare; return False if there is no such spare."""
        lost, node = self.connection.services.executor.is_lost, self.places[index].node

        def worse(spare: Place) -> tuple[bool, bool]:  # A spare on a lost slot's node may be lost next.
            return spare.node == node, self._deaths[spare.node] >= AVOIDED_AFTER_DEATHS

        for position, spare in sorted(enumerate(self.spares), key=lambda each: worse(each[1])):
            if spare.node not in avoided and not lost(spare):
                places, spares = list(self.places), list(self.spares)
                places[index], spares[position] = spare, places[index]
                self.places, self.spares = tuple(places), tuple(spares)
                return True
        return False

    def _avoid_bad_nodes(self, worker_group: WorkerGroup) -> None:
        """Move a group's slots away from nodes where workers died repeatedly, to spares on other nodes."""
        avoided = [node for node, deaths in self._deaths.items() if deaths >= AVOIDED_AFTER_DEATHS]
        for index in worker_group.all_indices if avoided and self.spares else ():
            alone = all(group is worker_group or not group.live_slots() for group in self.groups_by_slot.get(index, ()))
            if self.places[index].node in avoided and alone:
                self._take_spare(index, avoided)

    def record_death(self, node: str) -> str:
        """Record a worker's death on a node; return a note about the node for the error text, or ""."""
        self._deaths[node] += 1
        deaths = self._deaths[node]
        if deaths < AVOIDED_AFTER_DEATHS or len({place.node for place in (*self.places, *self.spares)}) == 1:
            return ""
        lost = self.connection.services.executor.is_lost
        spared = any(place.node != node and not lost(place) for place in self.spares)
        then = ", which is avoided: a spare takes its place" if spared else ""
        return f"workers of pool {self.name!r} have died {deaths} times on node {node}{then}"

    def _replace_places(self, lost: Sequence[Place], within_s: float = REPLACED_EVERY_S) -> bool:
        """Call the executor's `replace` for lost slots; return False if the executor can't replace slots.

        Raises:
            _SlotsRefused: There are no slots now.
        """
        reservation = self.reservation
        assert reservation is not None
        request = attrs.evolve(self.request, slots=len(lost), timeout=within_s)
        with _catch_refusal():
            replaced = self.connection.services.executor.replace(reservation, lost, request)
        if replaced is None:
            return False
        replacements = {id(before): after for before, after in zip(reservation.places, replaced.places, strict=True)}
        with self.lock:
            self.reservation = replaced
            self.places = tuple(replacements[id(place)] for place in self.places)
            self.spares = tuple(replacements[id(place)] for place in self.spares)
        return True

    def _release_all(self, worker_group: WorkerGroup, gone: str) -> None:
        """Release all slots of a pool that has lost some, or raise PlacementError if other groups still use slots."""
        with self.lock:
            self.check_usable()
            other_names = {
                group.name for group in self.worker_groups if group is not worker_group and group.live_slots()
            }
            if other_names:
                raise PlacementError(
                    f"pool {self.name!r} has lost slot {gone}; it can't be reserved anew while group "
                    f"{', '.join(sorted(other_names))} lives on others of its slots"
                )
            reservation, self.reservation = self.reservation, None
        if reservation is not None:
            self.connection.services.executor.release(reservation)

    def _reserve_again(self) -> None:
        """Reserve all slots of the pool again, without spares if necessary.

        Raises:
            _SlotsRefused: There are no slots now.
        """
        reserve, has_spares = self.connection.services.executor.reserve, self.full_request != self.request
        for request in (self.full_request, self.request) if has_spares else (self.request,):
            try:
                with _catch_refusal():
                    self.accept_reservation(reserve(attrs.evolve(request, timeout=REPLACED_EVERY_S)))
                return
            except _SlotsRefused:
                if request is self.request:
                    raise

    def _maintain_spares(self) -> None:
        lost, last_text = self.connection.services.executor.is_lost, ""
        while not self._closing.wait(LOOKS_FOR_SLOTS_EVERY_S):
            try:
                with self._renewing, contextlib.suppress(_SlotsRefused):
                    if self._closing.is_set():
                        return
                    missing = [place for place in self.spares if lost(place)]
                    if missing and self.reservation is not None and not self._replace_places(missing, SPARED_EVERY_S):
                        return
            except ColocateError as error:  # The cluster may not answer, for example.
                text = f"pool {self.name!r} has no spare in the place of a lost one: {get_message(error)}"
                if not self._closing.is_set() and text != last_text:
                    self.connection.services.printer.call_soon(partial(_log.warning, text))
                    last_text = text
                self._closing.wait(SLOW_EVERY_S)

    def unreserved_error(self, what: str = "") -> ColocateError:
        """Return the error for a use of a pool without reserved slots, with `what` in the text. Call under the lock."""
        if any(worker_group.life.recovers for worker_group in self.worker_groups):
            then = "; its group's restart reserves slots again: call group.wait_ready(), or reserve another pool"
        else:
            then = ", and no restart of a group reserves slots again: close the pool, and reserve another"
        return ColocateError(f"pool {self.name!r} {what}has lost slots with their node{then}")

    def release_slots(self, worker_group: WorkerGroup) -> None:
        """Remove a closed group from the pool's slots."""
        with self.lock:
            remainder = {
                index: tuple(group for group in groups if group is not worker_group)
                for index, groups in self.groups_by_slot.items()
            }
            self.groups_by_slot = {index: groups for index, groups in remainder.items() if groups}
            self.connection.release_name(worker_group)
        self.on_groups_changed()

    def slot_neighbours(self, worker_group: WorkerGroup, slot: int) -> list[Worker]:
        """Return the workers that other groups run on a group's slot."""
        index = worker_group.indices[slot]
        groups = [
            group
            for group in self.groups_by_slot.get(index, ())
            if group is not worker_group and index in group.indices
        ]
        return [group.workforce.workers[group.indices.index(index)] for group in groups]

    # -- from driver to driver

    def survives(self, worker_group: WorkerGroup) -> bool:
        """Return whether a group stays alive after the end of this driver."""
        return (
            self.attachment is not None and not self.attachment.is_owner and worker_group.name in self.attachment.groups
        )

    def on_groups_changed(self) -> None:
        """Update a detached pool's record for later drivers after a change of the groups."""
        if self.attachment is not None:
            self.attachment.renew_lease()

    def close_for(self, by: str, grace: float, force: bool) -> None:
        if not self.claim_closing(by, force):
            return
        # Wait for a concurrent spawn or reservation, so that the new group or slots are released here, too.
        with self.lock:
            self._closing.set()
        errors: list[BaseException] = []
        try:
            errors += self.close_children(grace)
        finally:
            # Wait for a replacement of slots in progress, so that the new slots are released, too.
            renewed = self._renewing.acquire(timeout=RESTART_ENDS_WITHIN_S)
            try:
                if self.reservation is not None:
                    self._return_reservation(self.reservation)
            except Exception as error:
                errors.append(error)
            finally:
                if renewed:
                    self._renewing.release()
                if self._spares_thread is not None:
                    self._spares_thread.join(THREAD_ENDS_WITHIN_S)
                self.disown()
                self.life.set_closed()
        raise_together(f"pool {self.name!r} was closed with errors", errors)

    def abandon(self, by: str) -> None:
        """Close the pool at once, because the user interrupted its creation. An attached pool stays alive."""
        if self.attachment is not None:
            self.attachment.is_owner = False
        elif self.reservation is None:
            self.connection.services.executor.withdraw(self.request)
        super().abandon(by)

    def _return_reservation(self, reservation: Reservation) -> None:
        executor: Any = self.connection.services.executor
        if self.attachment is None or (self.attachment.is_owner and executor.retain(reservation)):
            executor.release(reservation)
        else:  # The pool is borrowed, or another driver has taken it during this close.
            executor.detach(reservation)

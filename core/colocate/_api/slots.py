"""`Slots`: those of a pool, reserved together, and who has taken them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from colocate._api.connection import Connection
from colocate._crew.attachment import Attachment
from colocate._crew.crew import Crew, Home
from colocate._crew.spawn import Declared
from colocate._owned.owned import raise_together
from colocate._protocol.versions import base_of
from colocate._role.budget import Budget
from colocate._signals.at_work import Section
from colocate._system.deadline import Deadline
from colocate._system.limits import REPLACED_EVERY_S
from colocate.errors import ColocateError, PlacementError, PlacementTimeout
from colocate.executor import Place, Request, Reservation


class Slots(Home):
    """The slots of a pool, and the crews on them.

    Attributes:
        connection: Of its runtime.
        request: What was asked for.
        budget: How much memory the roles of each may have.
        reservation: What the executor has given; None before, and while lost slots are reserved anew.
        places: Where its slots lie.
        taken: The crew on each that isn't free; replaced by another mapping when one goes.
        epoch: How many drivers have commanded it.
        attachment: How this driver has it, if it was detached once.
        lock: Held while any of these changes.
    """

    def __init__(self, connection: Connection, name: str, request: Request, budget: Budget) -> None:
        super().__init__("pool", name, connection)
        self.connection = connection
        self.request = request
        self.budget = budget
        self.reservation: Reservation | None = None
        self.epoch = 1
        self.attachment: Attachment | None = None
        self.places: tuple[Place, ...] = ()
        self.taken: dict[int, Crew] = {}
        self.lock = Section()
        self.join()

    @property
    def base(self) -> int:
        """Numbers of calls, holds and residents of this driver's are above this (see `_protocol/versions.py`)."""
        return base_of(self.epoch)

    @property
    def crews(self) -> list[Crew]:
        """Those on it."""
        return list(dict.fromkeys(list(self.taken.values())))

    def hold(self, reservation: Reservation) -> None:
        """Take the slots, or give them back at once when it has been closed meanwhile."""
        with self.lock:
            if self.closed_by is None:
                self.reservation = reservation
                self.places = reservation.places
                return
        self._give_back(reservation)
        self.check()

    def occupy(self, indices: tuple[int, ...], declared: Declared, name: str | None, restarts: int) -> Crew:
        """Put a group on slots that have to be free; nothing is started."""
        with self.lock:
            self.check()
            if self.reservation is None:
                raise self.unreserved()
            busy = {index: self.taken[index].name for index in indices if index in self.taken}
            if busy:
                index, holder = next(iter(busy.items()))
                raise ColocateError(
                    f"slot {index} of pool {self.name!r} is taken by group {holder!r}: a slot takes one group at a "
                    "time. Put the roles into one group, close the other one, or spawn on a part: pool[a:b].spawn(...)"
                )
            return self.place(indices, declared, name, restarts)

    def place(
        self, indices: Sequence[int], declared: Declared, name: str | None, restarts: int, generation: int = 0
    ) -> Crew:
        """Put a group on free slots; nothing is started."""
        with self.lock:
            self.check()  # another driver may have taken it: whoever closes it has all groups that were put here
            with self.connection.naming:
                name = self.connection.group_name(name)
                places = [self.places[index] for index in indices]
                services = self.connection.services
                crew = Crew(services, self, self.base, indices, places, declared, name, restarts, generation)
                self.connection.crews[name] = crew
            for index in indices:
                self.taken[index] = crew
            return crew

    def places_for(self, crew: Crew) -> list[Place]:
        """Where a group's slots lie. If the engine has lost some, all of the pool's are reserved anew.

        Raises:
            PlacementError: What is left of the cluster has no place for them.
        """
        executor = self.connection.services.executor
        given_back = self.reservation is None  # by an attempt before this one
        lost = [index for index in crew.indices if given_back or executor.lost(self.places[index])]
        if lost:
            self._reserve_again(crew, lost)
        return [self.places[index] for index in crew.indices]

    def unreserved(self, what: str = "") -> ColocateError:
        """The error of a use while no slots are reserved for it; `what` comes of that. Its lock is held."""
        if any(crew.life.recovers for crew in self.crews):
            then = "which the restart of its group does: wait for that with group.wait_ready(), or reserve another pool"
        else:
            then = "and the restart of its group, which does that, was given up: close it, and reserve another pool"
        return ColocateError(
            f"pool {self.name!r} {what}has lost slots with their node and has to be reserved anew, {then}"
        )

    def _reserve_again(self, crew: Crew, lost: Sequence[int]) -> None:
        with self.lock:
            self.check()
            gone = ", ".join(f"{index} on {self.places[index].node}" for index in lost)
            if self.attachment is not None:
                raise PlacementError(
                    f"pool {self.name!r} has lost slot {gone}; it was detached as {self.attachment.name!r}, and such a "
                    "pool isn't reserved anew"
                )
            others = {other.name for other in self.taken.values() if other is not crew}
            if others:
                raise PlacementError(
                    f"pool {self.name!r} has lost slot {gone}; it can't be reserved anew while group "
                    f"{', '.join(sorted(others))} lives on others of its slots"
                )
            reservation, self.reservation = self.reservation, None
        executor = self.connection.services.executor
        if reservation is not None:
            executor.release(reservation)
        deadline = Deadline(self.request.timeout)
        while self.reservation is None:
            self.check()  # whoever closes it doesn't wait for all of that time
            within = deadline.at_most(REPLACED_EVERY_S)
            try:
                self.hold(executor.reserve(attrs.evolve(self.request, timeout=within)))
            except PlacementTimeout as error:
                if within < REPLACED_EVERY_S:
                    error.add_note(f"that was tried for {self.request.timeout:g} s, since slot {gone} was lost")
                    raise

    def vacate(self, crew: Crew) -> None:
        """A group has gone: its slots are free."""
        with self.lock:
            self.taken = {index: other for index, other in self.taken.items() if other is not crew}
            self.forget(crew)
        self.changed()

    def others(self) -> Mapping[str, Crew]:
        """The crews of its runtime, by name."""
        return self.connection.crews

    def forget(self, crew: Crew) -> None:
        """Its name is free."""
        self.connection.forget(crew)

    # -- from driver to driver

    def goes_on(self, crew: Crew) -> bool:
        """Whether a group lives on when this driver lets go of it."""
        return self.attachment is not None and not self.attachment.own and crew.name in self.attachment.groups

    def changed(self) -> None:
        """What drivers after this one are to know of its groups has changed."""
        if self.attachment is not None:
            self.attachment.changed()

    @property
    def borrowed(self) -> bool:
        """Whether closing it ends this driver's borrow only."""
        return self.attachment is not None and not self.attachment.own

    def close_for(self, by: str | None, grace: float, force: bool) -> None:
        """Close it on behalf of `by` (None: of its caller)."""
        if self.forked:
            self.check()
        if not force and self.closed_by is None:
            self.refuse_if_borrowed()
        if not self.take_closing(by):
            return
        with self.lock:  # whoever has passed the check before is done: its group is a child, its slots are held
            reservation = self.reservation
        errors: list[BaseException] = []
        try:
            errors += self.close_children(grace)
        finally:
            try:
                if reservation is not None:
                    self._give_back(reservation)
            except Exception as error:
                errors.append(error)
            finally:
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

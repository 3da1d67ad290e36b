"""Pools that outlive their drivers, on a Dask cluster that was there before them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate.errors import EngineError
from colocate.executor import (
    Adopted,
    Boot,
    Detachable,
    Host,
    HostEvents,
    Place,
    Reach,
    Reservation,
    Watchable,
    Window,
)
from colocate.keeper import (
    AdoptedSlot,
    Adoption,
    KeptSlot,
    Lease,
    PoolKeepers,
    Registration,
    adopt_lead,
    listed,
    look_inside,
    registration_of,
)
from colocate_dask import reservations
from colocate_dask.executor import ANSWER_S, DaskExecutor, Lot


class JoinedDaskExecutor(DaskExecutor, Detachable, Watchable):
    """A cluster that others use too. The scheduler's plugin has the names; the first slot's keeper is the lead."""

    def publish(self, reservation: Reservation, lease: Lease) -> None:
        """Register the name; then have the keepers go on."""
        held: Lot = reservation.handle
        assert held.keepers is not None
        rows = [
            (worker, slot.address, attrs.evolve(place, handle=None))
            for (worker, slot), place in zip(held.slots.items(), reservation.places, strict=True)
        ]
        scheduler, lead = self._connection.on_scheduler, rows[0][0]

        def register(registration: Registration) -> bool:
            other = scheduler(reservations.publish, held.id, lead, registration, within_s=ANSWER_S)
            return other is None

        def withdraw() -> None:
            scheduler(reservations.withdraw, held.id, self._connection.id, within_s=ANSWER_S)

        held.keepers.publish(lease, (held.id, rows), register, withdraw, self.published)

    def published(self) -> Sequence[Mapping[str, Any]]:
        """Ask the lead of each."""
        return listed(self._keepers, self._registrations().values())

    def look(self, name: str) -> Mapping[str, Any]:
        """Ask the lead, and the keepers of all slots."""
        return look_inside(self._keepers, registration_of(self._registrations(), name))

    def adopt(self, name: str, who: str, own: bool, fenced: Callable[[str], None]) -> Adopted:
        """Adopt the lead, and by its leave the others."""
        registration = registration_of(self._registrations(), name)
        id, rows = registration.facts
        held = Lot(id)
        adoption = Adoption(who, own, fenced)
        lead = adopt_lead(self._keepers, registration, adoption, partial(self._kill, held, rows[0][0]))
        self._held[id] = held
        adoption = attrs.evolve(adoption, epoch=lead.epoch)
        places = []
        try:
            for worker, address, place in rows:
                slot: KeptSlot = lead
                if address != lead.address:
                    slot = AdoptedSlot(
                        self._keepers, address, registration.key, adoption, partial(self._kill, held, worker)
                    )
                    self._keepers.add(slot)
                held.slots[worker] = slot
                places.append(attrs.evolve(place, handle=slot))
        finally:
            held.keepers = PoolKeepers(registration.key, lead, list(held.slots.values()))
            reservation = Reservation(tuple(places), held)
            if len(places) < len(rows):  # it goes on without this driver
                self.let_go(reservation)
        return Adopted(reservation, lead.epoch, lead.record)

    def end(self, name: str) -> None:
        """Have the scheduler free it."""
        id, _ = registration_of(self._registrations(), name).facts
        self._connection.on_scheduler(reservations.release, id, within_s=ANSWER_S)

    def take(self, place: Place, boot: Boot, events: HostEvents, token: bytes) -> Host:
        """By the slot's keeper."""
        slot: KeptSlot = place.handle
        return slot.take(boot, events, token)

    def renew(self, reservation: Reservation, lease: Lease) -> None:
        """Tell the keepers."""
        if (keepers := reservation.handle.keepers) is not None:
            keepers.renew(lease)

    def retain(self, reservation: Reservation) -> bool:
        """Ask the lead."""
        held: Lot = reservation.handle
        return held.keepers is not None and held.keepers.retain()

    def let_go(self, reservation: Reservation) -> None:
        """Close the connections to its keepers, once they know."""
        held: Lot = reservation.handle
        if self._held.get(held.id) is held:
            del self._held[held.id]
        if held.keepers is not None:
            held.keepers.give_up()

    def reach(self) -> Reach:
        """By the address from which this driver talks to the scheduler."""
        return Reach(self._connection.host, self._keepers.tls)

    def announce(self, window: Window) -> None:
        """In the scheduler's plugin."""
        self._connection.on_scheduler(reservations.announce, window, self._connection.id, within_s=ANSWER_S)

    def retract(self, window: Window) -> None:
        """In the scheduler's plugin."""
        with contextlib.suppress(EngineError):  # it is gone, or this driver has left it
            self._connection.on_scheduler(reservations.retract, window, within_s=ANSWER_S)

    def windows(self) -> Sequence[Window]:
        """By the scheduler's plugin."""
        found: list[Window] = self._connection.on_scheduler(reservations.windows, within_s=ANSWER_S)
        return found

    def _registrations(self) -> dict[str, Registration]:
        found = self._connection.on_scheduler(reservations.registrations, within_s=ANSWER_S)
        return {registration.name: registration for registration in found}

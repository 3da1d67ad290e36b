"""Pools that outlive their drivers, on a Ray cluster that was there before them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate import wire
from colocate.errors import ColocateError, EngineError
from colocate.executor import (
    Adopted,
    Boot,
    Detachable,
    Host,
    HostEvents,
    Place,
    Reach,
    Request,
    Reservation,
    Running,
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
from colocate_ray.executor import LISTED_WITHIN_S, RELEASED_WITHIN_S, RayExecutor, is_gone, place_of
from colocate_ray.terms import Cluster, Slot


@attrs.define(eq=False)
class _Owned:
    """A reservation that an owner holds."""

    name: str
    request: str  # the reservation's id
    keepers: PoolKeepers


class JoinedRayExecutor(RayExecutor, Detachable, Watchable):
    """A cluster that others use too. Ray's store has the names; an owner has the lead keeper, and owns the slots."""

    def __init__(self, cluster: Cluster) -> None:
        """Use `RayExecutor.connect`."""
        super().__init__(cluster)
        self._owned: dict[int, _Owned] = {}

    def reserve(self, request: Request) -> Reservation:
        """By an owner, if the pool may be detached."""
        if not request.detachable:
            return super().reserve(request)
        number, key = next(self._numbers), wire.new_key()
        patience_s = request.timeout
        name, address = self._envoy.call("open_owner", request, key, patience_s=patience_s)
        lead = self._keepers.slot(address, key=key)
        try:
            if (lost := lead.wait_connected()) is not None:
                raise EngineError(f"the Ray actor that owns pool {request.owner!r} can't be reached: {lost}")
            slots: list[Slot] = self._envoy.call("reserve_by_owner", name, key, request, patience_s=patience_s)
            places = tuple(self._by_owner(number, name, slot, self._kept(slot, key, number, name)) for slot in slots)
        except BaseException:  # Ctrl-C too
            self._envoy.post("release_by_owner", name)
            lead.close()
            raise
        kept = [self._slots[place.handle] for place in places]
        self._owned[number] = _Owned(name, request.id, PoolKeepers(key, lead, kept))
        return Reservation(places, number)

    def release(self, reservation: Reservation) -> None:
        """Have the owner give everything back."""
        owned = self._owned.pop(reservation.handle, None)
        if owned is None:
            super().release(reservation)
            return
        try:
            self._envoy.call("release_by_owner", owned.name, within_s=RELEASED_WITHIN_S)
        except EngineError:  # the owner finds out that its driver has gone
            pass
        finally:
            for slot in (*owned.keepers.slots, owned.keepers.lead):
                slot.close()
            self._forget(reservation)

    def running(self) -> Sequence[Running]:
        """What Ray's tables have for this driver, and the workers as their keepers find them."""
        held = [owned.request for owned in self._owned.values()]
        return [*self._keepers.running(), *self._envoy.call("list_running", held, within_s=LISTED_WITHIN_S)]

    def publish(self, reservation: Reservation, lease: Lease) -> None:
        """Register the name; then have the keepers go on."""
        owned = self._owned[reservation.handle]
        rows = [
            (self._slots[place.handle].address, place.handle[1], attrs.evolve(place, handle=None))
            for place in reservation.places
        ]
        owned.keepers.publish(
            lease,
            (owned.name, owned.request, rows),
            partial(self._envoy.call, "publish"),
            partial(self._envoy.call, "withdraw", owned.name),
            self.published,
        )

    def published(self) -> Sequence[Mapping[str, Any]]:
        """Ask the lead of each."""
        return listed(self._keepers, self._registrations().values())

    def look(self, name: str) -> Mapping[str, Any]:
        """Ask the lead, and the keepers of all slots."""
        return look_inside(self._keepers, registration_of(self._registrations(), name))

    def adopt(self, name: str, who: str, own: bool, fenced: Callable[[str], None]) -> Adopted:
        """Adopt the lead, and by its leave the others."""
        registration = registration_of(self._registrations(), name)
        owner, request, rows = registration.facts
        adoption = Adoption(who, own, fenced)
        lead = adopt_lead(self._keepers, registration, adoption)
        adoption = attrs.evolve(adoption, epoch=lead.epoch)
        number = next(self._numbers)
        places = []
        try:
            for address, index, place in rows:
                key = number, index
                kept = AdoptedSlot(
                    self._keepers, address, registration.key, adoption, partial(self._end_by_owner, key, owner)
                )
                self._keepers.add(kept)
                self._slots[key] = kept
                places.append(attrs.evolve(place, handle=key))
        finally:
            slots = [self._slots[place.handle] for place in places]
            self._owned[number] = _Owned(owner, request, PoolKeepers(registration.key, lead, slots))
            reservation = Reservation(tuple(places), number)
            if len(places) < len(rows):  # it goes on without this driver
                self.let_go(reservation)
        return Adopted(reservation, lead.epoch, lead.record)

    def end(self, name: str) -> None:
        """End the owner; Ray frees what it has held."""
        owner, *_ = registration_of(self._registrations(), name).facts
        self._envoy.call("end_owner", owner, within_s=2 * RELEASED_WITHIN_S)  # it is ended, then Ray takes things back

    def take(self, place: Place, boot: Boot, events: HostEvents, token: bytes) -> Host:
        """By the slot's keeper."""
        return self._slots[place.handle].take(boot, events, token)

    def renew(self, reservation: Reservation, lease: Lease) -> None:
        """Tell the keepers."""
        if (owned := self._owned.get(reservation.handle)) is not None:
            owned.keepers.renew(lease)

    def retain(self, reservation: Reservation) -> bool:
        """Ask the lead."""
        owned = self._owned.get(reservation.handle)
        return owned is not None and owned.keepers.retain()

    def let_go(self, reservation: Reservation) -> None:
        """Close the connections to its keepers, once they know."""
        owned = self._owned.pop(reservation.handle, None)
        if owned is not None:
            owned.keepers.give_up()
            self._forget(reservation)

    def reach(self) -> Reach:
        """By the address that Ray has for this machine."""
        return Reach(self._envoy.call("address_here"), self._keepers.tls)

    def announce(self, window: Window) -> None:
        """In Ray's store."""
        self._envoy.call("announce", window, within_s=LISTED_WITHIN_S)

    def retract(self, window: Window) -> None:
        """In Ray's store."""
        with contextlib.suppress(ColocateError):  # the cluster is gone, or this driver has left it
            self._envoy.call("retract", window, within_s=LISTED_WITHIN_S)

    def windows(self) -> Sequence[Window]:
        """By Ray's store, of the drivers that Ray has."""
        found: list[Window] = self._envoy.call("windows", within_s=LISTED_WITHIN_S)
        return found

    def _kept(self, slot: Slot, key: bytes, number: int, owner: str) -> KeptSlot:
        ends = partial(self._end_by_owner, (number, slot.index), owner)
        return self._keepers.slot(slot.address, on_stuck=ends, key=key, gone=is_gone(slot))

    def _by_owner(self, number: int, owner: str, slot: Slot, kept: KeptSlot) -> Place:
        self._slots[number, slot.index] = kept
        return place_of(slot, (number, slot.index))

    def _end_by_owner(self, key: tuple[int, int], owner: str) -> None:
        with contextlib.suppress(ColocateError):  # it has gone, or the connection to Ray: so has the slot
            self._envoy.call("end_slot_by_owner", owner, key[1], within_s=RELEASED_WITHIN_S)

    def _registrations(self) -> dict[str, Registration]:
        found: list[Registration] = self._envoy.call("registrations", within_s=LISTED_WITHIN_S)
        return {registration.name: registration for registration in found}

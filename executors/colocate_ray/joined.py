"""Pools that outlive their drivers, on a Ray cluster that was there before them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate import wire
from colocate.errors import ColocateError, ConfigError, EngineError
from colocate.executor import Adopted, Boot, Detachable, Host, HostEvents, Place, Request, Reservation, Running
from colocate.keeper import Claim, ClaimedSlot, Estate, KeptSlot, Terms, Title, claim_lead, listed, title_of
from colocate_ray.executor import LISTED_WITHIN_S, RELEASED_WITHIN_S, RayExecutor, place_of
from colocate_ray.terms import Cluster, Slot


@attrs.define(eq=False)
class _Custody:
    """A reservation that a custodian holds."""

    name: str
    request: str  # the reservation's id
    estate: Estate


class JoinedRayExecutor(RayExecutor, Detachable):
    """A cluster that others use too. Ray's store has the names; a custodian has the lead keeper, and owns the slots."""

    def __init__(self, cluster: Cluster) -> None:
        """Use `RayExecutor.connect`."""
        super().__init__(cluster)
        self._custody: dict[int, _Custody] = {}

    def reserve(self, request: Request) -> Reservation:
        """By a custodian, if the pool may be detached."""
        if not request.detachable:
            return super().reserve(request)
        number, key = next(self._numbers), wire.new_key()
        name, address = self._envoy.call("open_custodian", request, key)
        lead = self._keepers.slot(address, key=key)
        try:
            if (lost := lead.wait_connected()) is not None:
                raise EngineError(f"the Ray actor that owns pool {request.owner!r} can't be reached: {lost}")
            slots: list[Slot] = self._envoy.call("reserve_in_custody", name, key, request)
            places = tuple(self._in_custody(number, name, slot, self._kept(slot, key, number, name)) for slot in slots)
        except BaseException:  # Ctrl-C too
            self._envoy.post("release_in_custody", name)
            lead.close()
            raise
        kept = [self._slots[place.handle] for place in places]
        self._custody[number] = _Custody(name, request.id, Estate(key, lead, kept))
        return Reservation(places, number)

    def release(self, reservation: Reservation) -> None:
        """Have the custodian give everything back."""
        custody = self._custody.pop(reservation.handle, None)
        if custody is None:
            super().release(reservation)
            return
        try:
            self._envoy.call("release_in_custody", custody.name, within_s=RELEASED_WITHIN_S)
        except EngineError:  # the custodian finds out that its driver has gone
            pass
        finally:
            for slot in (*custody.estate.slots, custody.estate.lead):
                slot.close()
            self._forget(reservation)

    def running(self) -> Sequence[Running]:
        """What Ray's tables have for this driver, and the workers as their keepers find them."""
        held = [custody.request for custody in self._custody.values()]
        return [*self._keepers.running(), *self._envoy.call("list_running", held, within_s=LISTED_WITHIN_S)]

    def publish(self, reservation: Reservation, terms: Terms) -> None:
        """Register the name; then have the keepers go on."""
        custody = self._custody[reservation.handle]
        rows = [
            (self._slots[place.handle].address, place.handle[1], attrs.evolve(place, handle=None))
            for place in reservation.places
        ]
        title = custody.estate.title(terms, (custody.name, custody.request, rows))
        if not self._envoy.call("publish", title):
            raise ConfigError(
                f"there is a detached pool {terms.name!r} in this cluster already: {self._words(terms.name)}; names "
                f"are unique (colocate close {terms.name} ends that one)"
            )
        try:
            custody.estate.detach(terms)
        except BaseException:
            if custody.estate.retain():
                self._envoy.call("withdraw", custody.name)
            raise

    def published(self) -> Sequence[Mapping[str, Any]]:
        """Ask the lead of each."""
        return listed(self._keepers, self._titles().values())

    def adopt(self, name: str, who: str, own: bool, fenced: Callable[[str], None]) -> Adopted:
        """Claim the lead, and by its leave the others."""
        title = title_of(self._titles(), name)
        custodian, request, rows = title.facts
        claim = Claim(who, own, fenced)
        lead = claim_lead(self._keepers, title, claim)
        claim = attrs.evolve(claim, epoch=lead.epoch)
        number = next(self._numbers)
        places = []
        for address, index, place in rows:
            key = number, index
            kept = ClaimedSlot(self._keepers, address, title.key, claim, partial(self._end_in_custody, key, custodian))
            self._keepers.add(kept)
            self._slots[key] = kept
            places.append(attrs.evolve(place, handle=key))
        slots = [self._slots[place.handle] for place in places]
        self._custody[number] = _Custody(custodian, request, Estate(title.key, lead, slots))
        return Adopted(Reservation(tuple(places), number), lead.epoch, lead.record)

    def end(self, name: str) -> None:
        """End the custodian; Ray frees what it has held."""
        custodian, *_ = title_of(self._titles(), name).facts
        self._envoy.call("end_custodian", custodian, within_s=RELEASED_WITHIN_S)

    def take(self, place: Place, boot: Boot, events: HostEvents, token: bytes) -> Host:
        """By the slot's keeper."""
        return self._slots[place.handle].take(boot, events, token)

    def keep(self, reservation: Reservation, terms: Terms) -> None:
        """Tell the keepers."""
        if (custody := self._custody.get(reservation.handle)) is not None:
            custody.estate.keep(terms)

    def retain(self, reservation: Reservation) -> bool:
        """Ask the lead."""
        custody = self._custody.get(reservation.handle)
        return custody is not None and custody.estate.retain()

    def let_go(self, reservation: Reservation) -> None:
        """Close the connections to its keepers, once they know."""
        custody = self._custody.pop(reservation.handle, None)
        if custody is not None:
            custody.estate.give_up()
            self._forget(reservation)

    def _kept(self, slot: Slot, key: bytes, number: int, custodian: str) -> KeptSlot:
        ends = partial(self._end_in_custody, (number, slot.index), custodian)
        return self._keepers.slot(slot.address, on_stuck=ends, key=key)

    def _in_custody(self, number: int, custodian: str, slot: Slot, kept: KeptSlot) -> Place:
        self._slots[number, slot.index] = kept
        return place_of(slot, (number, slot.index))

    def _end_in_custody(self, key: tuple[int, int], custodian: str) -> None:
        with contextlib.suppress(ColocateError):  # it has gone, or the connection to Ray: so has the slot
            self._envoy.call("end_slot_in_custody", custodian, key[1], within_s=RELEASED_WITHIN_S)

    def _titles(self) -> dict[str, Title]:
        found: list[Title] = self._envoy.call("titles", within_s=LISTED_WITHIN_S)
        return {title.name: title for title in found}

    def _words(self, name: str) -> str:
        seen = next((each for each in self.published() if each["name"] == name), None)
        return "it is about to end" if seen is None else f"pool {seen['pool']!r} of {seen['slots']} slots"

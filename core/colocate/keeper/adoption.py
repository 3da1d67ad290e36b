"""The driver's side of a pool that may be detached: all its keepers together, one of which is the lead."""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import attrs

from colocate import wire
from colocate._protocol.commands import (
    NEWCOMER,
    Attach,
    Detach,
    Fenced,
    GiveUp,
    Granted,
    Look,
    LookInside,
    Refused,
    Renew,
    Retain,
    Seen,
    SeenInside,
)
from colocate._protocol.message import Head, Message, read
from colocate._protocol.requests import Requests
from colocate._system.deadline import Deadline
from colocate._system.limits import ADOPTED_WITHIN_S, LEFT_WITHIN_S, NAME_SETTLES_WITHIN_S
from colocate.errors import BorrowedError, ClosedError, ClusterError, ColocateError, ConfigError
from colocate.executor import Boot, Detachable, Host, HostEvents, Lease, Place, Reservation
from colocate.keeper.slots import Keepers, KeptSlot

_STEP_S = 0.02
_AT_ONCE = 16


@attrs.frozen
class Registration:
    """What a registry of the cluster has of a detached pool: enough to find it and to prove that one may.

    Attributes:
        name: What it is called in the cluster.
        lead: Address of the lead keeper.
        key: The secret of its keepers.
        facts: What the executor needs to find the slots again; plain data.
        about: What listings show of it when the lead doesn't answer; `since` is when it got the name.
        keepers: Addresses of the keepers of its slots.
    """

    name: str
    lead: str
    key: bytes = attrs.field(repr=False)
    facts: Any = None
    about: dict[str, Any] = attrs.field(factory=dict)
    since: float = attrs.field(factory=time.time)
    keepers: tuple[str, ...] = ()

    def unseen(self) -> dict[str, Any]:
        """Return what listings show when its lead doesn't answer: what was known when it got the name."""
        unknown = dict.fromkeys(("epoch", "driver", "owned", "ttl_s", "left_s"))
        return {"name": self.name, "answers": False, **unknown, "since": self.since, **self.about}


@attrs.frozen
class Adoption:
    """What a newcomer says.

    Attributes:
        who: Who it is, in words.
        own: Whether it takes the pool from whoever has it.
        epoch: What the lead has granted; 0 to the lead itself.
        fenced: Told, on the event loop's thread, when another driver has taken the pool: who, in words.
    """

    who: str
    own: bool
    fenced: Callable[[str], None]
    epoch: int = 0


class AdoptedSlot(KeptSlot):
    """A slot whose keeper another driver has started."""

    def __init__(
        self,
        keepers: Keepers,
        address: str,
        key: bytes,
        adoption: Adoption,
        on_stuck: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(keepers, address, on_stuck, key)
        self.record = b""
        self.epoch = 0
        self._adoption = adoption
        self._refusal: Refused | None = None
        self._answers: Requests[None, None] = Requests()
        self._asked = self._answers.open([None])

    def connect(self) -> None:
        """Adopt it, after the lead has been granted."""
        try:
            if not self._closed:
                self._dial()
        except (OSError, ColocateError) as error:
            if self._refusal is not None and self._refusal.kind == "late":  # the lead's word of it is on its way
                self._closed = True
                self._adoption.fenced(self._refusal.words)
            self._lost = f"its keeper can't be had: {error}"
            self.keepers.event_loop.later(0.0, partial(self._over, self._lost))
        finally:
            self._connected.set()

    def adopt(self) -> None:
        """Adopt it as the lead.

        Raises:
            BorrowedError: Another driver has it.
            ClusterError: It is gone.
        """
        try:
            self._dial()
        except OSError as error:
            raise ClusterError(f"its lead keeper can't be reached: {error}") from error
        finally:
            self._connected.set()

    def _dial(self) -> None:
        """Adopt it.

        Raises:
            BorrowedError: Another driver has it.
            ClosedError: A later driver has it, or it isn't detached any more.
            ClusterError: No answer.
        """
        keepers, adoption = self.keepers, self._adoption
        lane = self._commands = keepers.dial(self.address, NEWCOMER, self._received, self._disconnected, self.key)
        lane.send(Attach(adoption.epoch, adoption.who, adoption.own).head())
        try:
            self._asked.result(Deadline(ADOPTED_WITHIN_S))
        except TimeoutError:
            _let_it_go_on(lane)
            raise ClusterError(f"the keeper at {self.address} doesn't answer") from None
        except BaseException:  # Ctrl-C too
            _let_it_go_on(lane)
            raise
        if self._closed:
            _let_it_go_on(lane)

    def _told(self, message: Message) -> None:
        match message:
            case Granted():
                self.epoch, self.record = message.epoch, message.record
                self._answers.answered(self._asked.token, None, None)
            case Refused(kind=kind, words=words):
                self._refusal = message
                error = BorrowedError(words, borrowers=(words,)) if kind == "borrowed" else ClosedError(words)
                self._answers.refused(self._asked.token, error)
            case Fenced():
                self._closed = self.fenced = True
                self._adoption.fenced(message.who)
            case _:
                super()._told(message)

    def _disconnected(self, reason: str) -> None:
        self._answers.fail_all(ClusterError(f"the keeper at {self.address} has ended"))
        super()._disconnected(reason)


def _let_it_go_on(lane: wire.SocketLane) -> None:
    """Give an adoption up that may be granted all the same: as an owner's, its end would be the pool's."""
    lane.send(GiveUp().head())
    lane.close()


class PoolKeepers:
    """The keepers of one pool that may be detached.

    Attributes:
        key: Their secret.
        lead: The one that has the record.
        slots: Those with slots; the lead may be among them.
    """

    def __init__(self, key: bytes, lead: KeptSlot, slots: Sequence[KeptSlot]) -> None:
        """Take them together."""
        self.key = key
        self.lead = lead
        self.slots = slots

    def publish(
        self,
        lease: Lease,
        facts: Any,
        register: Callable[[Registration], bool],
        withdraw: Callable[[], object],
        published: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        """Have the pool be found by its name, and every keeper go on without this driver, when that lets go.

        Args:
            lease: What the keepers go on with.
            facts: What the executor needs to find the slots again; plain data.
            register: Enters it in the cluster's registry; False when another pool has its name.
            withdraw: Takes it out again.
            published: All pools that leads tell of.

        Raises:
            ConfigError: Another pool has its name.
            ClusterError: A keeper doesn't confirm it; the pool is this driver's as before.
        """
        keepers = tuple(slot.address for slot in self.slots)
        registration = Registration(lease.name, self.lead.address, self.key, facts, lease.about, keepers=keepers)
        deadline = Deadline(NAME_SETTLES_WITHIN_S)
        while not register(registration):
            other = next((each for each in published() if each["name"] == lease.name), None)
            if other is not None or deadline.is_over:
                words = "it has ended, of which the cluster hasn't heard"
                if other is not None:
                    words = f"pool {other['pool']!r} of {other['slots']} slots"
                raise ConfigError(
                    f"there is a detached pool {lease.name!r} in this cluster already: {words}; names are unique "
                    f"(colocate close {lease.name} ends that one)"
                )
            time.sleep(_STEP_S)  # it has ended, of which the registry is about to hear; or it is just being detached
        try:
            self.detach(lease)
        except BaseException:  # Ctrl-C too
            if self.retain():
                withdraw()
            raise

    def detach(self, lease: Lease) -> None:
        """Have every keeper go on without this driver, when that lets go.

        Raises:
            ClusterError: One of them doesn't confirm it.
        """
        # The lead last: until it agrees nobody can attach, and what goes wrong before ends with the driver.
        for slot in [*(slot for slot in self.slots if slot is not self.lead), self.lead]:
            its = lease if slot is self.lead else attrs.evolve(lease, record=b"", about={})
            lost = slot.wait_connected()
            if lost is not None or not slot.confirm(partial(Detach, lease=its), within_s=ADOPTED_WITHIN_S):
                raise ClusterError(f"the keeper at {slot.address} doesn't confirm that the pool is detached")

    def renew(self, lease: Lease) -> None:
        """The record has changed."""
        for slot in self._all():
            slot.command(Renew(lease if slot is self.lead else attrs.evolve(lease, record=b"", about={})))

    def retain(self) -> bool:
        """Have it to oneself, until it is detached again; False when another driver has it.

        The lead's word is enough: nobody gets at the others without.
        """
        if self.lead.wait_connected() is None:
            self.lead.confirm(Retain, within_s=ADOPTED_WITHIN_S)  # one that is gone, or stuck, grants it to nobody
        if self.lead.fenced:  # also where the connection has ended since
            return False
        for slot in self._all():
            slot.command(Retain(None))
        return not self.lead.fenced

    def give_up(self) -> None:
        """Let go; the pool goes on."""
        deadline = Deadline(LEFT_WITHIN_S)
        for slot in self._all():
            slot.leave()
        for slot in self._all():
            slot.left(deadline)

    def _all(self) -> list[KeptSlot]:
        return [*(slot for slot in self.slots if slot is not self.lead), self.lead]


def adopt_pool(
    keepers: Keepers,
    registration: Registration,
    adoption: Adoption,
    slots: Sequence[tuple[str, Callable[[], None]]],
) -> tuple[AdoptedSlot, PoolKeepers]:
    """Adopt a pool: its lead at once, as that decides; by its leave the others, in the background.

    Args:
        keepers: Those of this driver.
        registration: What the registry has of the pool.
        adoption: Who wants it.
        slots: For each slot, in order, its keeper's address, and what ends the process of that one where it is stuck.

    Raises:
        BorrowedError: Another driver has it.
        ClusterError: It is gone.
    """
    ends = dict(slots)
    lead = adopt_lead(keepers, registration, adoption, ends.get(registration.lead, lambda: None))
    adoption = attrs.evolve(adoption, epoch=lead.epoch)
    taken: list[KeptSlot] = []
    try:
        for address, end in slots:
            slot = lead
            if address != lead.address:
                slot = AdoptedSlot(keepers, address, registration.key, adoption, end)
                keepers.add(slot)
            taken.append(slot)
    except BaseException:  # it goes on without this driver
        PoolKeepers(registration.key, lead, taken).give_up()
        raise
    return lead, PoolKeepers(registration.key, lead, taken)


def adopt_lead(
    keepers: Keepers, registration: Registration, adoption: Adoption, on_stuck: Callable[[], None] = lambda: None
) -> AdoptedSlot:
    """Adopt a pool: its lead decides.

    Raises:
        BorrowedError: Another driver has it.
        ClusterError: It is gone.
    """
    lead = AdoptedSlot(keepers, registration.lead, registration.key, adoption, on_stuck)
    keepers.track(lead)
    try:
        lead.adopt()
    except BorrowedError as error:
        lead.close()
        raise BorrowedError(
            f"pool {registration.name!r} is attached by {error.message}. Wait for that to end, or take it: "
            f"runtime.attach({registration.name!r}, own=True)",
            borrowers=error.borrowers,
        ) from None
    except (ClosedError, ClusterError) as error:
        lead.close()
        raise ClusterError(f"pool {registration.name!r} can't be attached: {error.message}") from error
    except BaseException:
        lead.close()
        raise
    return lead


# -- looking at detached pools, whoever commands them: nothing of them changes by it


def listed(keepers: Keepers, registrations: Collection[Registration]) -> list[Mapping[str, Any]]:
    """Return what the leads of detached pools say of them, all asked at once, without those that are gone by now."""
    if not registrations:
        return []
    with ThreadPoolExecutor(min(len(registrations), _AT_ONCE), "colocate-listing") as pool:
        return [each for each in pool.map(partial(_listed, keepers), registrations) if each is not None]


def look_inside(keepers: Keepers, registration: Registration) -> dict[str, Any]:
    """Return what the workers of a detached pool do, and who has it, by all its keepers, asked at once.

    Returns:
        What listings show; and as "workers" what each of them says of itself, as "silent" those that say nothing, and
        as "lost" how many keepers don't answer.

    Raises:
        ClusterError: It is gone.
    """
    addresses = registration.keepers
    facts = _listed(keepers, registration)
    if facts is None:
        raise ClusterError(f"pool {registration.name!r} is gone")
    with ThreadPoolExecutor(min(len(addresses), _AT_ONCE) or 1, "colocate-looking") as pool:
        answers = list(pool.map(partial(_inside, keepers, registration), addresses))
    found = [each for each in answers if each is not None]
    return {
        **facts,
        "workers": [json.loads(worker) for each in found for worker in each.workers],
        "silent": [name for each in found for name in each.silent],
        "lost": len(addresses) - len(found),
    }


def _listed(keepers: Keepers, registration: Registration) -> Mapping[str, Any] | None:
    try:
        seen = _asked(keepers, registration.lead, registration, Look())
    except TimeoutError:  # a machine that is overloaded, or cut off; a process that is stopped
        return registration.unseen()
    except (OSError, ClosedError, ClusterError):  # it has ended
        return None
    assert isinstance(seen, Seen)
    return seen.facts


def _inside(keepers: Keepers, registration: Registration, address: str) -> SeenInside | None:
    try:
        seen = _asked(keepers, address, registration, LookInside())
    except (OSError, ClosedError, ClusterError):  # TimeoutError is an OSError
        return None
    assert isinstance(seen, SeenInside)
    return seen


def _asked(keepers: Keepers, address: str, registration: Registration, question: Message) -> Message:
    """Return a keeper's answer.

    Raises:
        TimeoutError: It doesn't come.
        OSError: The keeper can't be reached.
        ClusterError: It has ended.
    """
    answers: Requests[None, Message] = Requests()
    asked = answers.open([None])

    def told(head: Head, body: Any) -> None:
        answers.answered(asked.token, None, read(head))

    def closed(reason: str) -> None:
        answers.fail_all(ClusterError(reason))

    lane: wire.SocketLane = keepers.dial(address, NEWCOMER, told, closed, registration.key)
    lane.send(question.head())
    try:
        (answer,) = asked.result(Deadline(ADOPTED_WITHIN_S))
    finally:
        lane.close()
    return answer


class DetachableByKeepers(Detachable):
    """Pools that outlive their drivers, by the keepers of their slots.

    What is left to an executor is the cluster's: a registry of names (`publish`, `registrations`), to `adopt` what the
    cluster holds (`adopt_pool`), to `let_go` of it, and to `end` a pool whose keepers don't answer.
    """

    _keepers: Keepers

    @abc.abstractmethod
    def registrations(self) -> Iterable[Registration]:
        """Return what the cluster's registry has of the detached pools of the cluster."""

    @abc.abstractmethod
    def pool_of(self, reservation: Reservation) -> PoolKeepers | None:
        """Return the keepers of a reservation; None of one that isn't detachable, or that was let go."""

    @abc.abstractmethod
    def slot_of(self, place: Place) -> KeptSlot:
        """Return the connection to the keeper of a slot."""

    def registration(self, name: str) -> Registration:
        """Return the registration of a pool.

        Raises:
            ConfigError: There is none of that name.
        """
        registrations = {each.name: each for each in self.registrations()}
        found = registrations.get(name)
        if found is None:
            known = ", ".join(map(repr, sorted(registrations))) or "none"
            raise ConfigError(f"no pool {name!r} is detached in this cluster; there are: {known}")
        return found

    def published(self) -> Sequence[Mapping[str, Any]]:
        """Ask the lead of each."""
        return listed(self._keepers, list(self.registrations()))

    def look(self, name: str) -> Mapping[str, Any]:
        """Ask the lead, and the keepers of all slots."""
        return look_inside(self._keepers, self.registration(name))

    def take(self, place: Place, boot: Boot, events: HostEvents, token: bytes) -> Host:
        """By the slot's keeper."""
        return self.slot_of(place).take(boot, events, token)

    def renew(self, reservation: Reservation, lease: Lease) -> None:
        """Tell the keepers."""
        if (pool := self.pool_of(reservation)) is not None:
            pool.renew(lease)

    def retain(self, reservation: Reservation) -> bool:
        """Ask the lead."""
        pool = self.pool_of(reservation)
        return pool is not None and pool.retain()

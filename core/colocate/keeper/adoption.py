"""The driver's side of pools that may be detached. One of a pool's keepers is the lead, which decides for the pool."""

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
    ExpirePool,
    InspectPool,
    InspectWorkers,
    LeadGranted,
    LeadLost,
    LeadRefused,
    PoolStatus,
    Renew,
    Retain,
    WorkerStatus,
)
from colocate._protocol.message import Head, Message, decode_head
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
    """The entry of a detached pool in the cluster's registry: the keepers' addresses, and the secret for access.

    Attributes:
        name: The pool's name in the cluster.
        lead: Address of the lead keeper.
        key: The secret of the pool's keepers.
        facts: The executor's own data for finding the slots again; plain data.
        about: Fields that listings show if the lead doesn't answer. `since` is the time of the registration.
        keepers: Addresses of the keepers of the pool's slots.
    """

    name: str
    lead: str
    key: bytes = attrs.field(repr=False)
    facts: Any = None
    about: dict[str, Any] = attrs.field(factory=dict)
    since: float = attrs.field(factory=time.time)
    keepers: tuple[str, ...] = ()

    def describe_unanswered(self) -> dict[str, Any]:
        """Return the facts that listings show if the lead doesn't answer, as known at the time of the registration."""
        unknown = dict.fromkeys(("epoch", "driver", "owned", "ttl_s", "left_s"))
        return {"name": self.name, "answers": False, **unknown, "since": self.since, **self.about}


@attrs.frozen
class Adoption:
    """A driver's request to adopt a detached pool.

    Attributes:
        driver_label: The driver, described for error texts.
        takes_ownership: Whether the driver takes the pool from its current driver.
        epoch: The epoch that the lead has granted; 0 in the request to the lead itself.
        on_fenced: Called on the event loop's thread if another driver takes the pool, with a description of that
            driver.
    """

    driver_label: str
    takes_ownership: bool
    on_fenced: Callable[[str], None]
    epoch: int = 0


class AdoptedSlot(KeptSlot):
    """A slot of an adopted pool. Another driver has started the slot's keeper."""

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
        self._refusal: LeadRefused | None = None
        self._answers: Requests[None, None] = Requests()
        self._request = self._answers.open([None])

    def connect(self) -> None:
        """Adopt the keeper with the epoch that the lead has granted."""
        try:
            if not self._closed:
                self._dial()
        except (OSError, ColocateError) as error:
            # A later driver has the pool, and the lead's message that says so hasn't arrived yet.
            if self._refusal is not None and self._refusal.kind == "late":
                self._closed = True
                self._adoption.on_fenced(self._refusal.words)
            self._lost = f"its keeper can't be had: {error}"
            self.keepers.event_loop.call_later(0.0, partial(self._on_keeper_gone, self._lost))
        finally:
            self._connected.set()

    def adopt(self) -> None:
        """Adopt the keeper as the lead of a pool, and wait until the adoption is granted.

        Raises:
            BorrowedError: Another driver has the pool.
            ClusterError: The keeper is gone.
        """
        try:
            self._dial()
        except OSError as error:
            raise ClusterError(f"its lead keeper can't be reached: {error}") from error
        finally:
            self._connected.set()

    def _dial(self) -> None:
        """Connect to the keeper, and wait until the adoption is granted.

        Raises:
            BorrowedError: Another driver has the pool.
            ClosedError: A later driver has the pool, or the pool isn't detached any more.
            ClusterError: The keeper didn't answer in time.
        """
        keepers, adoption = self.keepers, self._adoption
        lane = self._commands = keepers.dial(self.address, NEWCOMER, self._on_message, self._on_disconnected, self.key)
        lane.send(Attach(adoption.epoch, adoption.driver_label, adoption.takes_ownership).head())
        try:
            self._request.result(Deadline(ADOPTED_WITHIN_S))
        except TimeoutError:
            _abandon_adoption(lane)
            raise ClusterError(f"the keeper at {self.address} doesn't answer") from None
        except BaseException:  # This clause also handles Ctrl-C.
            _abandon_adoption(lane)
            raise
        if self._closed:
            _abandon_adoption(lane)

    def _handle_message(self, message: Message) -> None:
        match message:
            case LeadGranted():
                self.epoch, self.record = message.epoch, message.record
                self._answers.add_answer(self._request.token, None, None)
            case LeadRefused(kind=kind, words=words):
                self._refusal = message
                error = BorrowedError(words, borrowers=(words,)) if kind == "borrowed" else ClosedError(words)
                self._answers.add_refusal(self._request.token, error)
            case LeadLost():
                self._closed = self.is_fenced = True
                self._adoption.on_fenced(message.driver)
            case _:
                super()._handle_message(message)

    def _on_disconnected(self, reason: str) -> None:
        self._answers.fail_all(ClusterError(f"the keeper at {self.address} has ended"))
        super()._on_disconnected(reason)


def _abandon_adoption(lane: wire.SocketLane) -> None:
    """Abandon an adoption that the keeper may still grant.

    Without the message `ExpirePool`, the end of an owner's connection would end the pool.
    """
    lane.send(ExpirePool().head())
    lane.close()


class PoolKeepers:
    """The keepers of one pool that may be detached.

    Attributes:
        key: The keepers' secret.
        lead: The keeper that has the record.
        slots: The slots of the pool, each with its keeper. The lead may be one of these.
    """

    def __init__(self, key: bytes, lead: KeptSlot, slots: Sequence[KeptSlot]) -> None:
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
        """Publish the pool under the lease's name and detach every keeper from this driver.

        Args:
            lease: The terms under which the keepers continue without a driver.
            facts: The executor's own data for finding the slots again; plain data.
            register: Adds the registration to the cluster's registry; returns False if another pool has the name.
            withdraw: Removes the registration again.
            published: Returns the facts of all detached pools, as reported by the leads.

        Raises:
            ConfigError: Another pool has the name.
            ClusterError: A keeper doesn't confirm the detachment. The pool still belongs to this driver.
        """
        keepers = tuple(slot.address for slot in self.slots)
        registration = Registration(lease.name, self.lead.address, self.key, facts, lease.about, keepers=keepers)
        deadline = Deadline(NAME_SETTLES_WITHIN_S)
        while not register(registration):
            other = next((pool for pool in published() if pool["name"] == lease.name), None)
            if other is not None or deadline.is_over:
                words = "it has ended, of which the cluster hasn't heard"
                if other is not None:
                    words = f"pool {other['pool']!r} of {other['slots']} slots"
                raise ConfigError(
                    f"there is a detached pool {lease.name!r} in this cluster already: {words}; names are unique "
                    f"(colocate close {lease.name} ends that one)"
                )
            time.sleep(_STEP_S)  # The pool that has the name may have just ended, or may just be detaching.
        try:
            self.detach(lease)
        except BaseException:  # This clause also handles Ctrl-C.
            if self.retain():
                withdraw()
            raise

    def detach(self, lease: Lease) -> None:
        """Detach every keeper, so that the workers continue after this driver has released the pool.

        Raises:
            ClusterError: A keeper doesn't confirm the detachment.
        """
        # The lead comes last, because no driver can attach to the pool before the lead agrees.
        for slot in [*(slot for slot in self.slots if slot is not self.lead), self.lead]:
            slot_lease = lease if slot is self.lead else attrs.evolve(lease, record=b"", about={})
            lost = slot.wait_connected()
            if lost is not None or not slot.confirm(partial(Detach, lease=slot_lease), within_s=ADOPTED_WITHIN_S):
                raise ClusterError(f"the keeper at {slot.address} doesn't confirm that the pool is detached")

    def renew_lease(self, lease: Lease) -> None:
        """Send the lease with a changed record to all keepers."""
        for slot in self._list_slots():
            slot.send_command(Renew(lease if slot is self.lead else attrs.evolve(lease, record=b"", about={})))

    def retain(self) -> bool:
        """Take the pool back for this driver until the next detach. Returns False if another driver has the pool.

        The lead's answer is enough, because no driver reaches the other keepers without the lead.
        """
        if self.lead.wait_connected() is None:
            # The result isn't needed: a lead keeper that is gone or stuck can't grant the pool to another driver.
            self.lead.confirm(Retain, within_s=ADOPTED_WITHIN_S)
        if self.lead.is_fenced:  # `is_fenced` stays true even if the connection has ended since.
            return False
        for slot in self._list_slots():
            slot.send_command(Retain(None))
        return not self.lead.is_fenced

    def leave_pool(self) -> None:
        """Release all keepers, while the pool continues without this driver."""
        deadline = Deadline(LEFT_WITHIN_S)
        for slot in self._list_slots():
            slot.begin_release()
        for slot in self._list_slots():
            slot.finish_release(deadline)

    def _list_slots(self) -> list[KeptSlot]:
        return [*(slot for slot in self.slots if slot is not self.lead), self.lead]


def adopt_pool(
    keepers: Keepers,
    registration: Registration,
    adoption: Adoption,
    slots: Sequence[tuple[str, Callable[[], None]]],
) -> tuple[AdoptedSlot, PoolKeepers]:
    """Adopt a pool: first the lead, because the lead decides, then the other keepers in the background.

    Args:
        keepers: This driver's connections.
        registration: The pool's registration.
        adoption: The request of this driver.
        slots: For each slot, in order, the keeper's address, and a callback that ends a stuck keeper's process.

    Raises:
        BorrowedError: Another driver has the pool.
        ClusterError: The pool is gone.
    """
    ends = dict(slots)
    lead = adopt_lead(keepers, registration, adoption, ends.get(registration.lead, lambda: None))
    adoption = attrs.evolve(adoption, epoch=lead.epoch)
    adopted_slots: list[KeptSlot] = []
    try:
        for address, end in slots:
            slot = lead
            if address != lead.address:
                slot = AdoptedSlot(keepers, address, registration.key, adoption, end)
                keepers.add_slot(slot)
            adopted_slots.append(slot)
    except BaseException:  # After an error the pool continues without this driver.
        PoolKeepers(registration.key, lead, adopted_slots).leave_pool()
        raise
    return lead, PoolKeepers(registration.key, lead, adopted_slots)


def adopt_lead(
    keepers: Keepers, registration: Registration, adoption: Adoption, on_stuck: Callable[[], None] = lambda: None
) -> AdoptedSlot:
    """Adopt the lead keeper of a pool, which decides whether this driver gets the pool.

    Raises:
        BorrowedError: Another driver has the pool.
        ClusterError: The pool is gone.
    """
    lead = AdoptedSlot(keepers, registration.lead, registration.key, adoption, on_stuck)
    keepers.track_slot(lead)
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


# -- inspection of detached pools, whichever driver has them; nothing changes


def list_pools(keepers: Keepers, registrations: Collection[Registration]) -> list[Mapping[str, Any]]:
    """Request the facts of detached pools from the leads, in parallel. Pools that have ended are left out."""
    if not registrations:
        return []
    with ThreadPoolExecutor(min(len(registrations), _AT_ONCE), "colocate-listing") as pool:
        return [listing for listing in pool.map(partial(_list_pool, keepers), registrations) if listing is not None]


def inspect_pool(keepers: Keepers, registration: Registration) -> dict[str, Any]:
    """Request the status of a detached pool, including all workers, from all keepers in parallel.

    Returns:
        The facts as in `list_pools`. "workers" has the status of each worker, "silent" the names of workers without an
        answer, and "lost" the number of keepers that don't answer.

    Raises:
        ClusterError: The pool is gone.
    """
    addresses = registration.keepers
    facts = _list_pool(keepers, registration)
    if facts is None:
        raise ClusterError(f"pool {registration.name!r} is gone")
    with ThreadPoolExecutor(min(len(addresses), _AT_ONCE) or 1, "colocate-looking") as pool:
        answers = list(pool.map(partial(_inspect_keeper, keepers, registration), addresses))
    replies = [reply for reply in answers if reply is not None]
    return {
        **facts,
        "workers": [json.loads(worker) for reply in replies for worker in reply.workers],
        "silent": [name for reply in replies for name in reply.silent],
        "lost": len(addresses) - len(replies),
    }


def _list_pool(keepers: Keepers, registration: Registration) -> Mapping[str, Any] | None:
    try:
        status = _ask_keeper(keepers, registration.lead, registration, InspectPool())
    except TimeoutError:  # The machine may be overloaded or disconnected, or the process may be stopped.
        return registration.describe_unanswered()
    except (OSError, ClosedError, ClusterError):  # The keeper has ended.
        return None
    assert isinstance(status, PoolStatus)
    return status.facts


def _inspect_keeper(keepers: Keepers, registration: Registration, address: str) -> WorkerStatus | None:
    try:
        status = _ask_keeper(keepers, address, registration, InspectWorkers())
    except (OSError, ClosedError, ClusterError):  # TimeoutError is a subclass of OSError.
        return None
    assert isinstance(status, WorkerStatus)
    return status


def _ask_keeper(keepers: Keepers, address: str, registration: Registration, question: Message) -> Message:
    """Send a question to a keeper, and return the keeper's answer.

    Raises:
        TimeoutError: No answer arrives in time.
        OSError: The keeper can't be reached.
        ClusterError: The keeper has ended.
    """
    answers: Requests[None, Message] = Requests()
    request = answers.open([None])

    def told(head: Head, body: Any) -> None:
        answers.add_answer(request.token, None, decode_head(head))

    def closed(reason: str) -> None:
        answers.fail_all(ClusterError(reason))

    lane: wire.SocketLane = keepers.dial(address, NEWCOMER, told, closed, registration.key)
    lane.send(question.head())
    try:
        (answer,) = request.result(Deadline(ADOPTED_WITHIN_S))
    finally:
        lane.close()
    return answer


class DetachableByKeepers(Detachable):
    """A base class for executors with detachable pools. The keepers of such a pool outlive the driver.

    An executor adds a registry of names (`publish`, `list_registrations`), `adopt` to take over the cluster's
    reservation (`adopt_pool`), `detach` to release a pool, and `end_pool` for a pool whose keepers don't answer.
    """

    _keepers: Keepers

    @abc.abstractmethod
    def list_registrations(self) -> Iterable[Registration]:
        """Return the registrations of all detached pools of the cluster."""

    @abc.abstractmethod
    def get_pool(self, reservation: Reservation) -> PoolKeepers | None:
        """Return the keepers of a reservation. None if the pool isn't detachable, or was released."""

    @abc.abstractmethod
    def get_slot(self, place: Place) -> KeptSlot:
        """Return the driver's connection to the keeper of a slot."""

    def find_registration(self, name: str) -> Registration:
        """Return the registration of the pool with this name.

        Raises:
            ConfigError: No pool has this name.
        """
        registrations = {entry.name: entry for entry in self.list_registrations()}
        match = registrations.get(name)
        if match is None:
            names = ", ".join(map(repr, sorted(registrations))) or "none"
            raise ConfigError(f"no pool {name!r} is detached in this cluster; there are: {names}")
        return match

    def list_pools(self) -> Sequence[Mapping[str, Any]]:
        """Return the facts of all detached pools, as reported by their lead keepers."""
        return list_pools(self._keepers, list(self.list_registrations()))

    def inspect_pool(self, name: str) -> Mapping[str, Any]:
        """Return the status of a detached pool, including all workers, as reported by all keepers."""
        return inspect_pool(self._keepers, self.find_registration(name))

    def adopt_worker(self, place: Place, boot: Boot, events: HostEvents, token: bytes) -> Host:
        """Adopt a running worker through the slot's keeper."""
        return self.get_slot(place).adopt_worker(boot, events, token)

    def update_lease(self, reservation: Reservation, lease: Lease) -> None:
        """Send the lease with the changed record to the keepers."""
        if (pool := self.get_pool(reservation)) is not None:
            pool.renew_lease(lease)

    def retain(self, reservation: Reservation) -> bool:
        """Take a pool back for this driver. Returns False if another driver has the pool."""
        pool = self.get_pool(reservation)
        return pool is not None and pool.retain()

"""The driver's side of a pool that may be detached: all its keepers together, one of which is the lead."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate import wire
from colocate._protocol.commands import Attach, Detach, Fenced, GiveUp, Granted, Refused, Renew, Retain
from colocate._protocol.message import Message
from colocate._protocol.requests import Requests
from colocate._system.deadline import Deadline
from colocate._system.limits import ADOPTED_WITHIN_S, LEFT_WITHIN_S, NAME_SETTLES_WITHIN_S
from colocate.errors import BorrowedError, ClosedError, ColocateError, ConfigError, EngineError
from colocate.executor import Lease
from colocate.keeper.greeting import NEWCOMER
from colocate.keeper.slots import Keepers, KeptSlot

_STEP_S = 0.02


@attrs.frozen
class Registration:
    """What a registry of the engine has of a detached pool: enough to find it and to prove that one may.

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
        """What listings show when its lead doesn't answer: what was known when it got the name."""
        unknown = dict.fromkeys(("epoch", "driver", "owned", "ttl_s", "left_s"))
        return {"name": self.name, "answers": False, **unknown, "since": self.since, **self.about}


def registration_of(registrations: Mapping[str, Registration], name: str) -> Registration:
    """The registration of a pool.

    Raises:
        ConfigError: There is none of that name.
    """
    found = registrations.get(name)
    if found is None:
        known = ", ".join(map(repr, sorted(registrations))) or "none"
        raise ConfigError(f"no pool {name!r} is detached in this cluster; there are: {known}")
    return found


@attrs.frozen
class Adoption:
    """What a newcomer says.

    Attributes:
        who: Who it is, in words.
        own: Whether it takes the pool from whoever has it.
        epoch: What the lead has granted; 0 to the lead itself.
        fenced: Told, on the hub's thread, when another driver has taken the pool: who, in words.
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
            self.keepers.hub.later(0.0, partial(self._over, self._lost))
        finally:
            self._connected.set()

    def adopt(self) -> None:
        """Adopt it as the lead.

        Raises:
            BorrowedError: Another driver has it.
            EngineError: It is gone.
        """
        try:
            self._dial()
        except OSError as error:
            raise EngineError(f"its lead keeper can't be reached: {error}") from error
        finally:
            self._connected.set()

    def _dial(self) -> None:
        """Adopt it.

        Raises:
            BorrowedError: Another driver has it.
            ClosedError: A later driver has it, or it isn't detached any more.
            EngineError: No answer.
        """
        keepers, adoption = self.keepers, self._adoption
        lane = self._commands = keepers.dial(self.address, NEWCOMER, self._received, self._disconnected, self.key)
        lane.send(Attach(adoption.epoch, adoption.who, adoption.own).head())
        try:
            self._asked.result(Deadline(ADOPTED_WITHIN_S))
        except TimeoutError:
            _let_it_go_on(lane)
            raise EngineError(f"the keeper at {self.address} doesn't answer") from None
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
        self._answers.fail_all(EngineError(f"the keeper at {self.address} has ended"))
        super()._disconnected(reason)


def _let_it_go_on(lane: wire.SocketLane) -> None:
    """Nothing comes of an adoption, which may be granted all the same: as an owner's, its end would be the pool's."""
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
            register: Enters it in the engine's registry; False when another pool has its name.
            withdraw: Takes it out again.
            published: All pools that leads tell of.

        Raises:
            ConfigError: Another pool has its name.
            EngineError: A keeper doesn't confirm it; the pool is this driver's as before.
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
            EngineError: One of them doesn't confirm it.
        """
        # The lead last: until it agrees nobody can attach, and what goes wrong before ends with the driver.
        for slot in [*(slot for slot in self.slots if slot is not self.lead), self.lead]:
            its = lease if slot is self.lead else attrs.evolve(lease, record=b"", about={})
            lost = slot.wait_connected()
            if lost is not None or not slot.confirm(partial(Detach, lease=its), within_s=ADOPTED_WITHIN_S):
                raise EngineError(f"the keeper at {slot.address} doesn't confirm that the pool is detached")

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


def adopt_lead(
    keepers: Keepers, registration: Registration, adoption: Adoption, on_stuck: Callable[[], None] = lambda: None
) -> AdoptedSlot:
    """Adopt a pool: its lead decides.

    Raises:
        BorrowedError: Another driver has it.
        EngineError: It is gone.
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
    except (ClosedError, EngineError) as error:
        lead.close()
        raise EngineError(f"pool {registration.name!r} can't be attached: {error.message}") from error
    except BaseException:
        lead.close()
        raise
    return lead

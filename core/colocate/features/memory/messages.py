"""What driver and workers say of memory: the first two to workers, the others from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from colocate._protocol.message import Head, Message, message

SLEEP, WAKE = "the sleep", "the wake"
"""What calls say that put a role to sleep, and wake it."""

Sizes: TypeAlias = "Mapping[str, Sequence[Mapping[str, int]]]"
"""What roles hold by name: the bytes on the slot's device, and those of the host, each by kind."""


@attrs.frozen
class Ledger:
    """A worker's memory in bytes."""

    # By role, kind (see `Purpose`) and device; residents of functions are those of a role without a name
    roles: Mapping[str, Mapping[tuple[str, str], int]]
    shared: Mapping[str, int]  # what roles hold that counts with another role, by role
    asleep: Mapping[str, int]  # what roles hold that isn't in memory (`group.sleep`), by role
    # What of roles was to sleep with that and is in memory, by role and why
    kept_awake: Mapping[str, Mapping[str, int]]
    partial: tuple[str, ...]  # roles that hold more objects than were looked at
    # What of the process's memory is its own, "private"; of it what was so before the first role was constructed,
    # "empty", was pinned for what sleeps of a device, "pinned", and is shared with other forks, "shared". None where
    # the process is the driver's.
    process: Mapping[str, int] | None
    # What torch knows of the slot's device: "allocated" and "reserved" by this process, "used" by anybody, "total", and
    # "nccl" by this process's communicators, where these tell; None of a slot without one. Without what sleeps and has
    # kept its addresses.
    gpu: Mapping[str, int] | None
    # What methods have allocated on it at most while they ran, by role and method; None where nobody knows
    peaks: Mapping[str, int] | None
    # What the processes that roles have started have for themselves, by role and name
    children: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)
    # What features tell of roles, by feature and role (`OfWorker.told`)
    told: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)


@message
class AskLedger(Message):
    """Say what the worker's memory is used for; answered by `LedgerTold`."""

    token: int  # the question's number


@message
class Beside(Message):
    """What the roles of another group hold that has a worker on this slot, too."""

    group: str  # the group's name
    roles: Sizes  # nothing when its worker has ended


@message
class LedgerTold(Message):
    """What the worker's memory is used for."""

    token: int  # the question's number
    ledger: Ledger | None  # it; None where what a role holds can't be looked at
    role: str = ""  # that role
    trace: str = ""  # the traceback of what was raised then

    def head(self) -> Head:
        """Return what travels of it."""
        ledger = None if self.ledger is None else attrs.astuple(self.ledger, recurse=False)
        return "LedgerTold", self.token, ledger, self.role, self.trace

    @classmethod
    def of(cls, *values: Any) -> LedgerTold:
        """As `Message.of`."""
        token, ledger, role, trace = values
        return cls(token, None if ledger is None else Ledger(*ledger), role, trace)


@message
class Holds(Message):
    """What its roles hold has changed, which workers of other groups on its slot are to know."""

    roles: Sizes


@message
class Moved(Message):
    """Memory of a role has gone to sleep, or has been woken."""

    role: str  # the role
    asleep: bool  # whether it has gone
    nbytes: int  # how many bytes
    start: float  # when that began, in seconds of time.time()
    end: float  # when it was done
    whole: bool  # whether all of it sleeps now
    why: str  # what for
    in_call: bool = False  # whether a call waited for that
    kept_awake: Mapping[str, int] = attrs.field(factory=dict)  # the bytes that were to go, too, and stay, by why

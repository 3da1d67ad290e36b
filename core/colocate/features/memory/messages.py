"""Messages about memory: `AskLedger` and `Beside` to workers, the others from workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from colocate._protocol.message import Head, Message, message

SLEEP, WAKE = "the sleep", "the wake"
"""The labels of the calls that put a role to sleep and wake a role."""

Sizes: TypeAlias = "Mapping[str, Sequence[Mapping[str, int]]]"
"""Bytes that roles hold, by name: on the slot's device and on the host, each by kind."""


@attrs.frozen
class Ledger:
    """A worker's memory in bytes."""

    # By role, kind (see `Purpose`) and device; residents of functions belong to a role without a name.
    roles: Mapping[str, Mapping[tuple[str, str], int]]
    shared: Mapping[str, int]  # bytes that a role holds and that count with another role, by role
    asleep: Mapping[str, int]  # bytes that sleep (`group.sleep`), by role
    # Memory that was to sleep with the rest and stays awake, by role and reason.
    kept_awake: Mapping[str, Mapping[str, int]]
    partial: tuple[str, ...]  # roles with more objects than the search visits
    # Bytes of the worker's process. "private": all but files and shared memory; of this, "empty" existed before the
    # first role was constructed, "pinned" is pinned for sleeping memory of a device, and "shared" is shared with other
    # forks. None if the process is the driver's.
    process: Mapping[str, int] | None
    # Torch's figures for the slot's device: "allocated" and "reserved" by this process, "used" by all processes,
    # "total", and "nccl" by this process's communicators, if reported. None for a slot without a device. Excludes
    # memory that sleeps in place (`sleep="vmm"`).
    gpu: Mapping[str, int] | None
    # The most that a method has allocated on the device while running, by role and method; None if unknown.
    peaks: Mapping[str, int] | None
    # Private bytes of the processes that roles have started, by role and name.
    children: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)
    # The features' reports on roles, by feature and role (`OfWorker.told`).
    told: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)


@message
class AskLedger(Message):
    """Ask for the worker's memory use; answered by `LedgerTold`."""

    token: int  # the question's number


@message
class Beside(Message):
    """The holdings of another group's roles on this slot."""

    group: str  # the group's name
    roles: Sizes  # empty once the other worker has ended


@message
class LedgerTold(Message):
    """The answer to `AskLedger`: the worker's memory use."""

    token: int  # the question's number
    ledger: Ledger | None  # None if a role's holdings can't be inspected
    role: str = ""  # the role that can't be inspected
    trace: str = ""  # the traceback of the failed inspection

    def head(self) -> Head:
        """Return the wire format."""
        ledger = None if self.ledger is None else attrs.astuple(self.ledger, recurse=False)
        return "LedgerTold", self.token, ledger, self.role, self.trace

    @classmethod
    def of(cls, *values: Any) -> LedgerTold:
        """As `Message.of`."""
        token, ledger, role, trace = values
        return cls(token, None if ledger is None else Ledger(*ledger), role, trace)


@message
class Holds(Message):
    """The roles' holdings have changed; for the workers of other groups on this slot."""

    roles: Sizes


@message
class Moved(Message):
    """Memory of a role has gone to sleep, or was woken."""

    role: str  # the role's name
    asleep: bool  # True for a sleep, False for a wake
    nbytes: int  # bytes moved
    start: float  # start, in seconds of time.time()
    end: float  # end, in seconds of time.time()
    whole: bool  # whether all of the role's memory sleeps now
    why: str  # the reason, in words
    in_call: bool = False  # whether a call waited for this
    kept_awake: Mapping[str, int] = attrs.field(factory=dict)  # bytes that were to sleep and stayed, by reason

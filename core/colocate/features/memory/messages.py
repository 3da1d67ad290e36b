"""Messages about memory. `AskLedger` and `NeighbourMemory` go to workers, and all others come from workers."""

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
    """The memory use of one worker, in bytes.

    Attributes:
        roles: Bytes by role, kind (see `Purpose`) and device; residents of functions belong to a role without a name.
        shared: Bytes that a role holds and that count with another role, by role.
        asleep: Bytes that sleep (`group.sleep`), by role.
        kept_awake: Bytes that should have slept but stay awake, by role and reason.
        partial: Roles with more objects than the search visits.
        process: Bytes of the worker's process: "private" is all memory but files and shared memory. Of this, "empty"
            existed before the first role was constructed, "pinned" is pinned for sleeping memory of a device, and
            "shared" is shared with other forks. None if the process is the driver's.
        gpu: Torch's figures for the slot's device: "allocated" and "reserved" by this process, "used" by all
            processes, "total", and "nccl" by this process's communicators, if reported. None for a slot without a
            device. Excludes memory that sleeps in place (`sleep="vmm"`).
        peaks: The most that a method has allocated on the device while running, by role and method; None if unknown.
        children: Private bytes of the processes that roles have started, by role and name.
        feature_reports: The features' reports on roles, by feature and role (`WorkerFeature.describe_role`).
    """

    roles: Mapping[str, Mapping[tuple[str, str], int]]
    shared: Mapping[str, int]
    asleep: Mapping[str, int]
    kept_awake: Mapping[str, Mapping[str, int]]
    partial: tuple[str, ...]
    process: Mapping[str, int] | None
    gpu: Mapping[str, int] | None
    peaks: Mapping[str, int] | None
    children: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)
    feature_reports: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)


@message
class AskLedger(Message):
    """The driver's question for a worker's memory use, answered by `LedgerReport`."""

    token: int  # The number of this question, which the answer repeats.


@message
class NeighbourMemory(Message):
    """The memory that the roles of another group hold on the same slot."""

    group: str  # The name of the other group.
    roles: Sizes  # The mapping is empty once the other group's worker has exited.


@message
class LedgerReport(Message):
    """A worker's answer to `AskLedger`, with the worker's memory use or the error of the inspection."""

    token: int
    ledger: Ledger | None  # None if the inspection of the worker's memory failed.
    role: str = ""  # The name of the role that can't be inspected.
    trace: str = ""  # The traceback of the failed inspection.

    def head(self) -> Head:
        """Return this message in the wire format."""
        ledger = None if self.ledger is None else attrs.astuple(self.ledger, recurse=False)
        return "LedgerReport", self.token, ledger, self.role, self.trace

    @classmethod
    def from_values(cls, *values: Any) -> LedgerReport:
        """Return the message for values from the wire; see `Message.from_values`."""
        token, ledger, role, trace = values
        return cls(token, None if ledger is None else Ledger(*ledger), role, trace)


@message
class RoleHoldings(Message):
    """A notification that the memory use of a worker's roles has changed, for other groups on the same slot."""

    roles: Sizes


@message
class MemoryMoved(Message):
    """A worker's notification that memory of a role was put to sleep or woken.

    Attributes:
        role: The role's name.
        asleep: True for a sleep, False for a wake.
        nbytes: The number of bytes moved.
        start: The start of the move, in seconds of time.time().
        end: The end of the move, in seconds of time.time().
        whole: Whether all of the role's memory sleeps now.
        why: The reason for the move, as text.
        in_call: Whether a call waited for the move.
        kept_awake: Bytes that should have slept but stay awake, by reason.
    """

    role: str
    asleep: bool
    nbytes: int
    start: float
    end: float
    whole: bool
    why: str
    in_call: bool = False
    kept_awake: Mapping[str, int] = attrs.field(factory=dict)

"""The messages and results of a profile, and the labels of the calls that begin and end a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from colocate._protocol.message import Message, message

BEGIN, END = "the profile's beginning", "the profile's end"
"""Labels of the calls on whole workers."""


@message
class AskClock(Message):
    """Ask a worker for the current time. The worker answers with `Clock`."""

    token: int  # The request's number.


@message
class Clock(Message):
    """A worker's answer to `AskClock`, with the current time."""

    token: int  # The request's number.
    now: float  # The worker's `time.time()`, in seconds.


Meeting: TypeAlias = tuple[str, int]
"""The id of an operation on a process group, equal on all ranks: a key for the group and the operation's number."""


@attrs.frozen
class RankProfile:
    """One rank's results of a profile. All times are in seconds of the driver's clock.

    Attributes:
        arrived: The start of each operation on process groups.
        waits: Intervals in which the rank did nothing but such an operation: operation, start and end, in order.
        traced: Whether torch's profiler ran, that is, torch had been imported.
        events: The number of events in the rank's part of the trace.
        nbytes: The size of that part.
    """

    arrived: Mapping[Meeting, float]
    waits: Sequence[tuple[Meeting, float, float]]
    traced: bool
    events: int
    nbytes: int

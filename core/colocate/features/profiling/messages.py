"""Messages of profiles, the first to workers, the second from workers; and the labels of both calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from colocate._protocol.message import Message, message

BEGIN, END = "the profile's beginning", "the profile's end"
"""Labels of the calls on whole workers."""


@message
class AskClock(Message):
    """Ask a worker for the time; answered by `Clock`."""

    token: int  # the request's number


@message
class Clock(Message):
    """The answer to `AskClock`."""

    token: int  # the request's number
    now: float  # the worker's `time.time()`, in seconds


Meeting: TypeAlias = tuple[str, int]
"""The id of an operation, equal on all participating ranks: a key for the group, and the operation's number."""


@attrs.frozen
class Profiled:
    """A rank's report on the profile; all times in seconds of the driver's clock.

    Attributes:
        arrived: The start of each operation on process groups.
        waits: Intervals without any other work than such an operation, in order: operation, start and end.
        traced: Whether torch's profiler ran, that is, torch had been imported.
        events: The number of events in the rank's part of the trace.
        nbytes: The size of that part.
    """

    arrived: Mapping[Meeting, float]
    waits: Sequence[tuple[Meeting, float, float]]
    traced: bool
    events: int
    nbytes: int

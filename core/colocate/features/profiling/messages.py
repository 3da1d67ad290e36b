"""What driver and workers say of profiles: the first to workers, the other from them; and what their calls say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from colocate._protocol.message import Message, message

BEGIN, END = "the profile's beginning", "the profile's end"
"""What the calls on whole workers say that they are."""


@message
class AskClock(Message):
    """Tell what time it is; answered by `Clock`."""

    token: int  # the question's number


@message
class Clock(Message):
    """Tell what time it is in a worker."""

    token: int  # the question's number
    now: float  # in seconds of its time.time()


Meeting: TypeAlias = tuple[str, int]
"""An operation of a process group, the same on all ranks that have a part: what tells its group, and its number."""


@attrs.frozen
class Profiled:
    """What a rank tells of its profile; all times in seconds of the driver's clock.

    Attributes:
        arrived: When it began each operation of process groups.
        waits: From when to when nothing but such an operation went on there, in order: which one, start and end.
        traced: Whether torch's profiler ran: torch had been imported.
        events: How many events its part of the trace has.
        nbytes: How many bytes that part has.
    """

    arrived: Mapping[Meeting, float]
    waits: Sequence[tuple[Meeting, float, float]]
    traced: bool
    events: int
    nbytes: int

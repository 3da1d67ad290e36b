"""Messages between the driver and workers about recordings."""

from __future__ import annotations

import attrs

from colocate._protocol.message import Message, message

RECORDING, COMPARISON = "the recording", "the comparison"
"""The labels of the calls on whole workers."""


@attrs.frozen
class RecordingOrder:
    """The instruction to record a role, or to stop recording, as sent to workers.

    Attributes:
        role: The role.
        folder: The role's folder; None to stop the recording.
        limit: The limit of the complete recording in bytes; None for no limit.
        inputs: Whether arguments are recorded, too.
        begins: Whether calls are recorded from now on; False to prepare only.
    """

    role: str
    folder: str | None
    limit: int | None = None
    inputs: bool = False
    begins: bool = False


@message
class RecordingNotice(Message):
    """A notice for the user about a recording, a replay or a comparison."""

    text: str


@message
class ComparedResult(Message):
    """The result of a call or a row on one rank, for a comparison on the driver. The body is a recorded document."""

    seq: int  # The call's number among the calls of the group.


@attrs.frozen
class ReplaySource:
    """The instruction to replay a role or to compare a role with a recording, as sent to workers.

    Attributes:
        folder: The role's folder in the recording.
        replays: Whether the recording answers calls.
        loose: Whether differences are warnings only.
        tolerance: The allowed distance of numbers.
        after: Calls up to this number of the group's order are skipped.
        joins: Whether the driver compares, because the number of ranks or a mesh differs.
        life: The identity of the group from start to end, across restarts.
    """

    folder: str
    replays: bool
    loose: bool = False
    tolerance: float = 0.0
    after: int = 0
    joins: bool = False
    life: str = ""

"""What driver and workers say of recordings."""

from __future__ import annotations

import attrs

from colocate._protocol.message import Message, message

RECORDING, COMPARISON = "the recording", "the comparison"
"""What the calls on whole workers say that they are."""


@attrs.frozen
class Recorded:
    """What of a role is recorded, as the workers are told.

    Attributes:
        role: The role.
        folder: Its folder; None where nothing is any more.
        limit: Bytes of the whole recording; None for any number.
        inputs: Whether what they are given is recorded, too.
        begins: Whether its calls are recorded from here on. Before that all ranks get ready.
    """

    role: str
    folder: str | None
    limit: int | None = None
    inputs: bool = False
    begins: bool = False


@message
class Noticed(Message):
    """A rank has something to say of its recording, or of one that it replays or compares with."""

    text: str  # in words


@message
class Gave(Message):
    """What a rank gave in a call that the driver compares, or a row of one. Body: a document."""

    seq: int  # the call


@attrs.frozen
class Played:
    """A recording of a role's that answers its calls, or that they are compared with, as the workers are told.

    Attributes:
        folder: The role's, in the recording.
        replays: Whether it answers.
        loose: Whether differences are only told.
        tolerance: How far numbers may be away.
        after: Calls up to this number of the group's order are left out.
        joins: Whether it is the driver who compares, as there are other ranks than were recorded.
        life: What the group is known by from its start to its end, whatever restarts there are.
    """

    folder: str
    replays: bool
    loose: bool = False
    tolerance: float = 0.0
    after: int = 0
    joins: bool = False
    life: str = ""

"""What driver and workers say of recordings."""

from __future__ import annotations

import attrs

from colocate._protocol.message import Message, message

RECORDING = "the recording"
"""What the call on whole workers says that it is."""


@attrs.frozen
class Recorded:
    """What of a role is recorded, as the workers are told.

    Attributes:
        role: The role.
        folder: Its folder; None where nothing is any more.
        limit: Bytes of the whole recording; None for any number.
        begins: Whether its calls are recorded from here on. Before that all ranks get ready.
    """

    role: str
    folder: str | None
    limit: int | None = None
    begins: bool = False


@message
class Noticed(Message):
    """A rank has something to say of its recording, or of one that it replays or compares with."""

    text: str  # in words

"""What driver and workers say of checkpoints: the first to workers, the other from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.from_worker import Failure
from colocate._protocol.message import Head, Message, message, values

CHECKPOINT, RESTORE = "the checkpoint", "the restore"
"""What the calls on whole workers say that they are."""


@message
class AskSaved(Message):
    """Write what roles have taken for a checkpoint, or look at its files; answered by `Saved`."""

    token: int  # the question's number
    directory: str = ""  # the checkpoint's folder
    names: Sequence[str] | None = None  # the files to look at, in the folder; None: write


@message
class Saved(Message):
    """What roles had to write of a checkpoint is written, or its files were looked at. Body: the exception, if any."""

    token: int  # the question's number
    more: bool  # whether there is more to write when all ranks have come as far
    open: Sequence[str]  # files that are open there to be written
    digests: Mapping[str, str]  # of those that were looked at, by name
    failure: Failure | None  # what it has failed of

    def head(self) -> Head:
        """Return what travels of it."""
        *others, failure = values(self)
        return "Saved", *others, None if failure is None else values(failure)

    @classmethod
    def of(cls, *values: Any) -> Saved:
        """As `Message.of`."""
        token, more, open_ones, digests, failure = values
        return cls(token, more, open_ones, digests, None if failure is None else Failure(*failure))

"""Messages about checkpoints: `AskSaved` to workers, `Saved` from workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.from_worker import Failure
from colocate._protocol.message import Head, Message, message, values

CHECKPOINT, RESTORE = "the checkpoint", "the restore"
"""The labels of the calls on whole workers."""


@message
class AskSaved(Message):
    """Ask for the second halves of `save`, or for a check of files; answered by `Saved`."""

    token: int  # the question's number
    directory: str = ""  # the checkpoint's folder
    names: Sequence[str] | None = None  # the files to check, in the folder; None: write


@message
class Saved(Message):
    """The answer to `AskSaved`: the second halves ran, or files were checked. Body: the exception, if any."""

    token: int  # the question's number
    more: bool  # whether another step follows when all ranks have finished this one
    open: Sequence[str]  # files that are open for writing
    digests: Mapping[str, str]  # SHA-256 of the checked files, by name
    failure: Failure | None  # the error, if any

    def head(self) -> Head:
        """Return the wire format."""
        *fields, failure = values(self)
        return "Saved", *fields, None if failure is None else values(failure)

    @classmethod
    def of(cls, *values: Any) -> Saved:
        """As `Message.of`."""
        token, more, open_ones, digests, failure = values
        return cls(token, more, open_ones, digests, None if failure is None else Failure(*failure))

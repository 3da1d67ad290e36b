"""The messages about checkpoints: the driver sends `AskState`, and a worker answers with `SavedState`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.from_worker import Failure
from colocate._protocol.message import Head, Message, message, values

CHECKPOINT, RESTORE = "the checkpoint", "the restore"
"""The labels of the two calls that run on whole workers."""


@message
class AskState(Message):
    """Ask a worker to run the remaining work of each role's `save`, or to check files. The answer is `SavedState`."""

    token: int  # The number of this request.
    directory: str = ""  # The checkpoint's folder.
    names: Sequence[str] | None = None  # The files to check in the folder; None asks for the remaining work of `save`.


@message
class SavedState(Message):
    """Answer `AskState` after a step of each role's `save` or a check of files. The body is the exception, if any."""

    token: int  # The number of the request.
    has_more: bool  # Whether another step follows once all ranks have finished this step.
    open_files: Sequence[str]  # Files that are still open for writing.
    digests: Mapping[str, str]  # The SHA-256 of each checked file.
    failure: Failure | None

    def head(self) -> Head:
        """Return the message in the wire format, in which the failure is a plain tuple."""
        *fields, failure = values(self)
        return "SavedState", *fields, None if failure is None else values(failure)

    @classmethod
    def from_values(cls, *values: Any) -> SavedState:
        """Return the message for values in the wire format."""
        token, more, open_ones, digests, failure = values
        return cls(token, more, open_ones, digests, None if failure is None else Failure(*failure))

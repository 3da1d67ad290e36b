"""Taps that convert a role's results to documents, for files or for a comparison on the driver."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colocate._system.jobs import message_of
from colocate._system.tracebacks import told
from colocate.features.recordings.digests import Digest
from colocate.features.recordings.files import Writer
from colocate.features.recordings.messages import Gave
from colocate.features.recordings.taps import Seen, Tap
from colocate.features.recordings.values import NotRecorded, packed
from colocate.worker.context import WorkerContext


class DocumentTap(Tap):
    """A tap that converts a role's results to documents."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._told: set[str] = set()

    def _is_over(self) -> bool:
        return False

    @abc.abstractmethod
    def _take(self, seen: Seen, pieces: Sequence[Any], length: int) -> None:
        """Handle a new document."""

    def gave(self, seen: Seen, value: Any) -> None:
        """Make a document with the value of a call."""
        self._add(seen, value)

    def gave_row(self, seen: Seen, row: int, value: Any, digest: Digest) -> None:
        """Make a document with the value of a row."""
        self._add(seen, value, row=row, digest=digest)

    def raised(self, seen: Seen, error: BaseException, row: int | None = None, digest: Digest | None = None) -> None:
        """Make a document with the class, the text and the traceback of an error."""
        kind = type(error)
        failed = {"class": f"{kind.__module__}:{kind.__qualname__}", "text": message_of(error), "trace": told(error)}
        fields: dict[str, Any] = {"error": failed} if row is None else {"error": failed, "row": row, "digest": digest}
        try:
            self._add(seen, (error.args, getattr(error, "__dict__", {})), strict=True, **fields)
        except NotRecorded:
            self._add(seen, ((failed["text"],), {}), **fields)

    def over(self, seen: Seen) -> None:
        """Make a document with the number of a call's rows."""
        self._add(seen, None, rows=seen.rows, **({"cut": True} if seen.cut else {}))

    def _add(self, seen: Seen, value: Any, strict: bool = False, **more: Any) -> None:
        if self._is_over():
            return
        about = {"method": seen.method, "call": seen.number, "place": seen.place, "seq": seen.seq}
        about |= {"begun": round(seen.begun, 6), "ended": round(time.time(), 6)}
        if "row" not in more or "inputs" in more:
            about["digest"] = seen.digest
        if "row" not in more and "inputs" not in more:
            about |= seen.had
            about |= {"weights": seen.weights} if seen.weights else {}
        about |= more
        if seen.defaults is not None and not {"row", "inputs"} & more.keys():
            about["defaults"], value = True, (value, seen.defaults)
        try:
            pieces, length = packed(value, about)
        except NotRecorded as error:
            if strict:
                raise
            problem = f"what {seen.method} {'is given' if 'inputs' in more else 'gives'} isn't recorded"
            if problem not in self._told:
                self._told.add(problem)
                self._tell(f"{problem}: {error}")
            pieces, length = packed(None, {**about, "missing": str(error)})
        self._take(seen, pieces, length)


class RecordingTap(DocumentTap):
    """A tap that writes a role's results to the files of a rank.

    Attributes:
        folder: The role's folder in the recording.
        has_begun: Whether a document was written.
    """

    def __init__(self, folder: str, rank: int, limit: int | None, inputs: bool, tell: Callable[[str], object]) -> None:
        super().__init__(tell)
        self.folder = Path(folder)
        self._inputs = inputs
        self._writer = Writer(self.folder, rank, limit, tell)
        self.has_begun = False

    def got(self, seen: Seen, arguments: Mapping[str, Any], row: int | None = None) -> None:
        """Write the arguments of a call or a row, if inputs are recorded."""
        if self._inputs:
            where: dict[str, Any] = {} if row is None else {"row": row}
            self._add(seen, dict(arguments), inputs=True, **where)

    def close(self, within_s: float | None = None) -> None:
        """Stop recording, and write the queued documents within a timeout of `within_s` seconds."""
        self._writer.close(within_s)

    def _is_over(self) -> bool:
        return self._writer.ended

    def _take(self, seen: Seen, pieces: Sequence[Any], length: int) -> None:
        self.has_begun = True
        self._writer.add(pieces, length)


class TellingTap(DocumentTap):
    """A tap that sends a role's results to the driver."""

    def __init__(self, context: WorkerContext, tell: Callable[[str], object]) -> None:
        super().__init__(tell)
        self._context = context

    def _take(self, seen: Seen, pieces: Sequence[Any], length: int) -> None:
        body = self._context.packed(b"".join(pieces), seen.method)
        self._context.say_result(Gave(seen.seq), body, seen.method)

"""Taps that encode a role's results as documents (entries of a recording), for files or for the driver's comparison."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colocate._system.jobs import get_message
from colocate._system.tracebacks import format_exception
from colocate.features.recordings.digests import Digest
from colocate.features.recordings.files import Writer
from colocate.features.recordings.messages import ComparedResult
from colocate.features.recordings.taps import Tap, TappedCall
from colocate.features.recordings.values import UnrecordableError, encode_document
from colocate.worker.context import WorkerContext


class DocumentTap(Tap):
    """A tap that encodes a role's results as documents (entries of a recording)."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._notify_user = tell
        self._reported: set[str] = set()

    def _is_over(self) -> bool:
        return False

    @abc.abstractmethod
    def _store_document(self, seen: TappedCall, pieces: Sequence[Any], length: int) -> None:
        """Write or send a new document."""

    def on_value(self, seen: TappedCall, value: Any) -> None:
        """Encode the value of a call as a document."""
        self._add_document(seen, value)

    def on_row(self, seen: TappedCall, row: int, value: Any, digest: Digest) -> None:
        """Encode the value of a row as a document."""
        self._add_document(seen, value, row=row, digest=digest)

    def on_error(
        self, seen: TappedCall, error: BaseException, row: int | None = None, digest: Digest | None = None
    ) -> None:
        """Encode the class, the text and the traceback of an error as a document."""
        kind = type(error)
        failed = {
            "class": f"{kind.__module__}:{kind.__qualname__}",
            "text": get_message(error),
            "trace": format_exception(error),
        }
        fields: dict[str, Any] = {"error": failed} if row is None else {"error": failed, "row": row, "digest": digest}
        try:
            self._add_document(seen, (error.args, getattr(error, "__dict__", {})), strict=True, **fields)
        except UnrecordableError:
            self._add_document(seen, ((failed["text"],), {}), **fields)

    def on_rows_ended(self, seen: TappedCall) -> None:
        """Encode the number of a call's rows as a document."""
        self._add_document(seen, None, rows=seen.rows, **({"cut": True} if seen.is_cut else {}))

    def _add_document(self, seen: TappedCall, value: Any, strict: bool = False, **more: Any) -> None:
        if self._is_over():
            return
        about = {"method": seen.method, "call": seen.number, "place": seen.place, "seq": seen.seq}
        about |= {"begun": round(seen.begun, 6), "ended": round(time.time(), 6)}
        if "row" not in more or "inputs" in more:
            about["digest"] = seen.digest
        if "row" not in more and "inputs" not in more:
            about |= seen.row_counts
            about |= {"weights": seen.weights} if seen.weights else {}
        about |= more
        if seen.defaults is not None and not {"row", "inputs"} & more.keys():
            about["defaults"], value = True, (value, seen.defaults)
        try:
            pieces, length = encode_document(value, about)
        except UnrecordableError as error:
            if strict:
                raise
            problem = f"what {seen.method} {'is given' if 'inputs' in more else 'gives'} isn't recorded"
            if problem not in self._reported:
                self._reported.add(problem)
                self._notify_user(f"{problem}: {error}")
            pieces, length = encode_document(None, {**about, "missing": str(error)})
        self._store_document(seen, pieces, length)


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

    def on_arguments(self, seen: TappedCall, arguments: Mapping[str, Any], row: int | None = None) -> None:
        """Write the arguments of a call or a row, if inputs are recorded."""
        if self._inputs:
            where: dict[str, Any] = {} if row is None else {"row": row}
            self._add_document(seen, dict(arguments), inputs=True, **where)

    def close(self, within_s: float | None = None) -> None:
        """Stop recording, and write the queued documents within a timeout of `within_s` seconds."""
        self._writer.close(within_s)

    def _is_over(self) -> bool:
        return self._writer.has_ended

    def _store_document(self, seen: TappedCall, pieces: Sequence[Any], length: int) -> None:
        self.has_begun = True
        self._writer.add_document(pieces, length)


class ReportingTap(DocumentTap):
    """A tap that sends a role's results to the driver."""

    def __init__(self, context: WorkerContext, tell: Callable[[str], object]) -> None:
        super().__init__(tell)
        self._context = context

    def _store_document(self, seen: TappedCall, pieces: Sequence[Any], length: int) -> None:
        body = self._context.pack_result(b"".join(pieces), seen.method)
        self._context.send_result(ComparedResult(seen.seq), body, seen.method)

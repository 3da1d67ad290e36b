"""Reads recorded documents (the entries of a rank's recording files), and groups the documents of each call."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from colocate.errors import SerializationError
from colocate.features.recordings.differences import ErrorText
from colocate.features.recordings.files import damaged_error, open_recording
from colocate.features.recordings.values import START, DocumentStart, Find, decode_document, digest_bytes, parse_head

_AT_ONCE = 256  # The metadata of at most this many documents is read ahead.


@attrs.frozen
class Document:
    """A recorded document (one entry of a recording), in a file or in memory: a value's metadata and location."""

    about: Mapping[str, Any]
    path: Path
    begin: int
    length: int
    nbytes: int  # The size of the document, including the head.
    entries: Mapping[str, Any]
    digest: str = ""  # The digest of the bytes after the head.
    data: bytearray | None = None  # The bytes after the head; None for a document in a file.

    @classmethod
    def from_bytes(cls, data: bytes) -> Document:
        """Create a document from received bytes."""
        begin = 8 + int.from_bytes(data[:8], "little")
        about, entries, length = parse_head(data[8:begin])
        return cls(about, Path(), begin, length, len(data), entries, data=bytearray(memoryview(data)[begin:]))

    def read_value(self, find: Find, device: str | None = None) -> Any:
        """Return the document's value; see `values.decode_document`.

        Raises:
            SerializationError: A class is missing here, or the document is damaged, or the file can't be read.
        """
        if self.data is not None:
            return decode_document(self.data, self.entries, find, device)
        data = bytearray(self.length)
        with open_recording(self.path) as file:
            file.seek(self.begin)
            count = file.readinto(data)
        if count < self.length:
            raise damaged_error(self.path, self.begin, "it is shorter than it was")
        if digest_bytes(data) != self.digest:
            raise damaged_error(self.path, self.begin, "these aren't the bytes that were written")
        try:
            return decode_document(data, self.entries, find, device)
        except SerializationError as error:
            raise SerializationError(f"{self.path}, entry at byte {self.begin}: {error.message}") from error


class RankFiles:
    """Reads a rank's recorded documents from files, in order and on demand.

    Attributes:
        is_torn: Whether the last document that was read is incomplete.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._number = self._at = 0
        self.is_torn = False

    def read_more(self) -> list[Document]:
        """Return the next complete documents, up to a fixed number. The list is empty if there are none yet."""
        path = self._folder / f"rank-{self._rank}.{self._number:04}.calls"
        documents: list[Document] = []
        # Check for the next file before reading, because this file is complete once the next one exists.
        follows = (self._folder / f"rank-{self._rank}.{self._number + 1:04}.calls").exists()
        try:
            with open_recording(path) as file:
                size = file.seek(0, 2)
                while len(documents) < _AT_ONCE and (document := self._read_document(file, path, size)) is not None:
                    self._at += document.nbytes
                    documents.append(document)
        except FileNotFoundError:
            return []
        if documents:
            return documents
        self.is_torn = self._at < size
        if not follows:
            return []
        if self.is_torn:
            raise damaged_error(path, self._at, "it ends amid an entry, and another file follows")
        self._number, self._at = self._number + 1, 0
        return self.read_more()

    def _read_document(self, file: Any, path: Path, size: int) -> Document | None:
        file.seek(self._at)
        if len(data := file.read(START)) < START:
            return None
        try:
            start = DocumentStart.from_bytes(data)
            if self._at + start.head + start.body > size:
                return None
            head = file.read(start.head - START)
            if digest_bytes(head) != start.head_digest:
                raise ValueError("its head isn't as it was written")
            about, entries, body = parse_head((data + head)[8:])
            if body != start.body:
                raise ValueError(f"its parts have {body:,} bytes, and it has {start.body:,}")
            _check_metadata(about)
        except ValueError as error:
            raise damaged_error(path, self._at, error) from error
        nbytes = start.head + start.body
        return Document(about, path, self._at + start.head, body, nbytes, entries, start.body_digest)


_NUMBER, _DIGEST = (int, float), dict
_REQUIRED: Mapping[str, Any] = {
    **dict.fromkeys(("call", "place", "seq"), int),
    **dict.fromkeys(("begun", "ended"), _NUMBER),
    "method": str,
    "digest": _DIGEST,
}
_FURTHER: Mapping[str, Any] = {
    **dict.fromkeys(("row", "rows", "valid", "padded"), int),
    **dict.fromkeys(("missing", "weights"), str),
    **dict.fromkeys(("cut", "defaults", "inputs"), bool),
    "error": dict,
}


def _check_metadata(about: Mapping[str, Any]) -> None:
    """Raise a ValueError if a key of a document's metadata is missing or has the wrong type."""
    kinds = {**{name: _FURTHER[name] for name in about.keys() & _FURTHER}, **_REQUIRED}
    wrong = next((name for name, kind in kinds.items() if not isinstance(about.get(name), kind)), None)
    if wrong is not None:
        raise ValueError(f"its {wrong!r} is {about.get(wrong)!r:.60}")
    for error in (about["error"],) if "error" in about else ():
        if not all(isinstance(error.get(name), str) for name in ("class", "text", "trace")):
            raise ValueError(f"its error is {error!r:.60}")
    for leaves in about["digest"].values():
        pairs = leaves if isinstance(leaves, list) else [leaves]
        if not all(isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in pairs):
            raise ValueError(f"its digest of arguments is {leaves!r:.60}")


@attrs.define
class RankCall:
    """The recorded documents of a call on one rank.

    Attributes:
        method: The method.
        number: The number of the call among the method's calls, from 0, counted from the start of the recording.
        place: The number of the call among all calls of the role on this rank.
        inputs: The arguments of the call and of each row, if recorded.
        rows: The rows in the order in which they ended, for a method whose rows end one by one.
        end: The document with the value, the error or the number of rows; None if the call hasn't ended.
    """

    method: str
    number: int
    place: int
    inputs: list[Document] = attrs.field(factory=list)
    rows: list[Document] = attrs.field(factory=list)
    end: Document | None = None

    @classmethod
    def from_metadata(cls, about: Mapping[str, Any]) -> RankCall:
        """Return a `RankCall` without documents, for the call in a document's metadata."""
        return cls(about["method"], about["call"], about["place"])

    @property
    def error_document(self) -> Document | None:
        """The document with the call's error, or None if the call has raised no error."""
        return self.end if self.end is not None and "error" in self.end.about else None

    def add_document(self, document: Document) -> None:
        """Add a document to this call."""
        if "inputs" in document.about:
            self.inputs.append(document)
        elif "row" in document.about:
            self.rows.append(document)
        else:
            self.end = document

    @property
    def about(self) -> Mapping[str, Any]:
        """The call's metadata, from the document that ends the call, or else from the last row or input."""
        return self.end.about if self.end is not None else [*self.inputs, *self.rows][-1].about

    @property
    def nbytes(self) -> int:
        """The size of all documents of the call, in bytes."""
        return sum(
            document.nbytes for document in (*self.inputs, *self.rows, *([] if self.end is None else [self.end]))
        )


class RankCalls:
    """The recorded calls of a rank, read from files as far as needed.

    Attributes:
        calls: The calls that were read, by method and number.
        files: The rank's files.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.files = RankFiles(folder, rank)
        self.calls: dict[tuple[str, int], RankCall] = {}
        self._unread: deque[Document] = deque()

    def get(self, method: str, number: int) -> RankCall | None:
        """Read documents up to a call's end, and return the call. Return None if the call's end wasn't recorded."""
        while (call := self.calls.get((method, number))) is None or call.end is None:
            if self.read_next() is None:
                return None
        return call

    def read_all(self) -> Mapping[tuple[str, int], RankCall]:
        """Read all files, and return all calls by method and number."""
        while self.read_next() is not None:
            pass
        return self.calls

    def read_next(self) -> Document | None:
        """Return the next document, or None if there is no complete document yet."""
        if not self._unread:
            self._unread.extend(self.files.read_more())
        if not self._unread:
            return None
        document = self._unread.popleft()
        about = document.about
        key = about["method"], about["call"]
        self.calls.setdefault(key, RankCall.from_metadata(about)).add_document(document)
        return document

    def skip_until(self, after: int) -> tuple[dict[str, int], int]:
        """Skip calls up to number `after` in the group's order. Return how many were skipped, by method and in all."""
        while (document := self.read_next()) is not None and document.about["seq"] <= after:
            pass
        counts: dict[str, int] = {}
        places = 0
        for key, call in [*self.calls.items()]:
            if call.about["seq"] <= after:
                counts[call.method] = max(counts.get(call.method, 0), call.number + 1)
                places = max(places, call.place + 1)
                del self.calls[key]
        return counts, places


def sort_rows(
    rows: Sequence[tuple[int, Document]], came: Sequence[tuple[int, int]] | None
) -> list[tuple[int, Document]]:
    """Sort rows, as pairs of rank and document, by their order of arrival at the driver.

    Rows that never arrived come last. If the order is unknown because the driver was killed, the end times on the
    ranks' clocks decide.
    """
    by_time = sorted(rows, key=lambda row: row[1].about["ended"])
    places: dict[tuple[int, int], list[int]] = {}
    for place, key in reversed([*enumerate(came or ())]):
        places.setdefault(key, []).append(place)
    last = len(came or ())
    turns = [(places.get((rank, document.about["row"])) or [last]).pop() for rank, document in by_time]
    return [row for _, row in sorted(zip(turns, by_time, strict=True), key=lambda pair: pair[0])]


def read_recorded(document: Document, find: Find) -> Any:
    """Return the value of a recorded document, or an `ErrorText` object for a recorded error."""
    if (error := document.about.get("error")) is not None:
        return ErrorText(f"{error['class'].partition(':')[2]}: {error['text']}")
    value = document.read_value(find)
    return value[0] if document.about.get("defaults") else value

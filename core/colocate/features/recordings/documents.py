"""What lies in a rank's files, and how it is read: documents, and the calls that these are of."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import attrs

from colocate._system.jobs import error_text
from colocate._system.numbers import size_text
from colocate.errors import SerializationError
from colocate.features.recordings.values import MOST_HEADER, Find, head_of, unpacked

_AT_ONCE = 256  # documents of which the heads are read together


@attrs.frozen
class Document:
    """A document in a file, or in memory: what it tells of itself, and where its value lies."""

    about: Mapping[str, Any]
    path: Path
    begin: int
    length: int
    nbytes: int  # with its head
    entries: Mapping[str, Any]
    data: bytearray | None = None  # of one in memory

    @classmethod
    def heard(cls, data: bytes) -> Document:
        """Return one that has come as bytes."""
        begin = 8 + int.from_bytes(data[:8], "little")
        about, entries, length = head_of(data[8:begin])
        return cls(about, Path(), begin, length, len(data), entries, bytearray(memoryview(data)[begin:]))

    def value(self, find: Find, device: str | None = None) -> Any:
        """Return its value; see `values.unpacked`.

        Raises:
            SerializationError: It can't be made here, or is damaged.
            OSError: It can't be read.
        """
        if self.data is not None:
            return unpacked(self.data, self.entries, find, device)
        data = bytearray(self.length)
        with FileIO(self.path) as file:
            file.seek(self.begin)
            left = memoryview(data)
            while left and (count := file.readinto(left)):
                left = left[count:]
        if left:
            raise SerializationError(f"{self.path} is shorter than it was")
        try:
            return unpacked(data, self.entries, find, device)
        except (pickle.UnpicklingError, EOFError) as error:
            raise SerializationError(f"{self.path} is damaged at byte {self.begin}: {error_text(error)}") from error


class RankFiles:
    """The documents of a rank, read one after the other as they are asked for.

    Attributes:
        is_torn: Whether the last one isn't whole, as far as was read.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._number = self._at = 0
        self.is_torn = False

    def more(self) -> list[Document]:
        """Return some of those that weren't returned before, and are there."""
        path = self._folder / f"rank-{self._rank}.{self._number:04}.calls"
        found: list[Document] = []
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                while len(found) < _AT_ONCE and (document := self._read(file, path, size)) is not None:
                    self._at += document.nbytes
                    found.append(document)
        except FileNotFoundError:
            return []
        if found:
            return found
        self.is_torn = self._at < size
        if not (self._folder / f"rank-{self._rank}.{self._number + 1:04}.calls").exists():
            return []
        self._number, self._at = self._number + 1, 0
        return self.more()

    def _read(self, file: Any, path: Path, size: int) -> Document | None:
        file.seek(self._at)
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or self._at + 8 + length > size:
            return None
        try:
            if length > MOST_HEADER:
                raise ValueError(f"a head of {size_text(length)}")
            about, entries, body = head_of(file.read(length))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SerializationError(f"{path} is damaged at byte {self._at}: {error_text(error)}") from error
        begin = self._at + 8 + length
        return None if begin + body > size else Document(about, path, begin, body, 8 + length + body, entries)


@attrs.define
class RankCall:
    """What a rank gave in a call.

    Attributes:
        method: The method.
        number: Which of its calls it was, from 0, counted from where the recording begins.
        place: Which of all calls of the role, on this rank.
        rows: Of one whose rows end one by one these, in the order in which they have ended.
        end: Its value, or error, or that its rows are all; None of one that hasn't ended.
    """

    method: str
    number: int
    place: int
    rows: list[Document] = attrs.field(factory=list)
    end: Document | None = None

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> RankCall:
        """Return the call that a document is of, without it."""
        return cls(about["method"], about["call"], about["place"])

    @property
    def raised(self) -> Document | None:
        """Return the error that has ended it, if one has."""
        return self.end if self.end is not None and "error" in self.end.about else None

    def add(self, document: Document) -> None:
        """Take one of its documents."""
        if "row" in document.about:
            self.rows.append(document)
        else:
            self.end = document

    @property
    def about(self) -> Mapping[str, Any]:
        """Return what is told of the call."""
        return self.end.about if self.end is not None else self.rows[-1].about

    @property
    def nbytes(self) -> int:
        """Return the bytes that the call has in files."""
        return sum(each.nbytes for each in (*self.rows, *([] if self.end is None else [self.end])))


class RankCalls:
    """The calls of a rank, as far as was read.

    Attributes:
        found: Those, by method and number.
        files: Where they are read.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.files = RankFiles(folder, rank)
        self.found: dict[tuple[str, int], RankCall] = {}
        self._more: deque[Document] = deque()

    def get(self, method: str, number: int) -> RankCall | None:
        """Return a call that has ended; reads as far as needed."""
        while (found := self.found.get((method, number))) is None or found.end is None:
            if self.read() is None:
                return None
        return found

    def all(self) -> Mapping[tuple[str, int], RankCall]:
        """Return all that are there."""
        while self.read() is not None:
            pass
        return self.found

    def read(self) -> Document | None:
        """Read one document; None where there is no other one now."""
        if not self._more:
            self._more.extend(self.files.more())
        if not self._more:
            return None
        document = self._more.popleft()
        about = document.about
        key = about["method"], about["call"]
        self.found.setdefault(key, RankCall.of(about)).add(document)
        return document

    def skip(self, after: int) -> tuple[dict[str, int], int]:
        """Leave out calls up to one of the group's order; return how many of each method these are, and of all."""
        while (document := self.read()) is not None and document.about["seq"] <= after:
            pass
        counts: dict[str, int] = {}
        places = 0
        for key, call in [*self.found.items()]:
            if call.about["seq"] <= after:
                counts[call.method] = max(counts.get(call.method, 0), call.number + 1)
                places = max(places, call.place + 1)
                del self.found[key]
        return counts, places


def in_order(
    rows: Sequence[tuple[int, Document]], came: Sequence[tuple[int, int]] | None
) -> list[tuple[int, Document]]:
    """Return rows of a call, each with its rank, as the driver has got them; those that it hasn't got come last.

    Where it isn't known what the driver has got, as it was killed, they come as they ended by the ranks' clocks.
    """
    by_time = sorted(rows, key=lambda row: row[1].about["ended"])
    places: dict[tuple[int, int], list[int]] = {}
    for place, key in reversed([*enumerate(came or ())]):
        places.setdefault(key, []).append(place)
    last = len(came or ())
    turns = [(places.get((rank, each.about["row"])) or [last]).pop() for rank, each in by_time]
    return [row for _, row in sorted(zip(turns, by_time, strict=True), key=lambda pair: pair[0])]

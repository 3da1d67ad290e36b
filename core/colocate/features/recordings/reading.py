"""`load_recording`: what was recorded, as Python has it; values are read when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from colocate._system.nearest import did_you_mean
from colocate.errors import ConfigError, SerializationError
from colocate.features.recordings.digests import Digest
from colocate.features.recordings.documents import Document, RankCall, RankCalls, in_order
from colocate.features.recordings.files import ROLE, RoleFolder, RowOrder, folder_of, why_ended
from colocate.features.recordings.values import Find, finder


def load_recording(folder: str | os.PathLike[str], *, packages: Collection[str] = ()) -> Recording:
    """Return what calls of roles gave in a run, as it was recorded.

    Values are read when they are asked for. Nothing of the code is run that they came from: classes of records are
    looked up in modules that are imported.

    Args:
        folder: That of a run, or of the recording.
        packages: Packages besides, whose modules may be imported for classes.

    Raises:
        ConfigError: There is no recording.
    """
    return Recording(folder_of(folder), finder(packages))


@attrs.frozen
class RecordedError:
    """What a call, or a row, has raised.

    Attributes:
        cls: Its class, as "module:Class".
        text: What it says.
        traceback: Its traceback.
    """

    cls: str
    text: str
    traceback: str

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> RecordedError | None:
        """Return the error of which a document tells, if it does."""
        told = about.get("error")
        return None if told is None else cls(told["class"], told["text"], told["trace"])


@attrs.frozen
class RecordedRow:
    """A row of a call that has ended.

    Attributes:
        index: Its index in what the rank had got; of a method that the driver gives rows, in what that had.
        rank: The rank on which it ended.
        ended: When, in seconds of time.time().
        error: What it has raised; None for nothing.
    """

    index: int
    rank: int
    ended: float
    error: RecordedError | None
    _document: Document = attrs.field(repr=False)
    _find: Find = attrs.field(repr=False)

    @property
    def value(self) -> Any:
        """Return the row's value. Errors: as of `RecordedCall.value`."""
        value = _value(self._document, self._find, self.error)
        return value if self._document.about["digest"] else value[1]  # of a method that yields


@attrs.frozen
class RecordedCall:
    """A call of a role.

    Attributes:
        method: The method.
        number: Which of its calls it is, from 0: counted from where the recording begins.
        place: Which of all calls of the role.
        seq: Its number in the order of its group.
        ranks: The ranks that have answered.
        begun: When the first of them began, in seconds of time.time().
        seconds: How long it took them.
        nbytes: The bytes that it has in files.
        error: What it has raised on the first rank on which it did; None for nothing.
    """

    method: str
    number: int
    place: int
    seq: int
    ranks: Sequence[int]
    begun: float
    seconds: float
    nbytes: int
    error: RecordedError | None
    _by_rank: Mapping[int, RankCall] = attrs.field(repr=False)
    _find: Find = attrs.field(repr=False)
    _came: Sequence[tuple[int, int]] | None = attrs.field(repr=False)

    @classmethod
    def of(
        cls, by_rank: Mapping[int, RankCall], find: Find, came: Mapping[int, Sequence[tuple[int, int]]]
    ) -> RecordedCall:
        """Return the call of which ranks have recorded something."""
        first = next(iter(by_rank.values()))
        abouts = [each.about for each in by_rank.values()]
        begun = min(about["begun"] for about in abouts)
        errors = (RecordedError.of(each.end.about) for each in by_rank.values() if each.end is not None)
        return cls(
            first.method,
            first.number,
            first.place,
            first.about["seq"],
            tuple(by_rank),
            begun,
            max(about["ended"] for about in abouts) - begun,
            sum(each.nbytes for each in by_rank.values()),
            next(filter(None, errors), None),
            by_rank,
            find,
            came.get(first.about["seq"]),
        )

    def value(self, rank: int = 0) -> Any:
        """Return what a rank gave.

        Raises:
            ConfigError: It gave nothing: it had no part in it, the call has rows, or the recording ends amid it.
            SerializationError: It isn't of what is recorded, it has raised, or its class isn't known here.
        """
        end = self._of(rank).end
        if end is None or "rows" in end.about:
            raise ConfigError(f"call {self.number} of {self.method} has no value of rank {rank}: see its rows")
        return _value(end, self._find, RecordedError.of(end.about))

    def values(self) -> list[Any]:
        """Return what each of its ranks gave. Errors: as of `value`."""
        return [self.value(rank) for rank in self.ranks]

    @property
    def missing(self) -> str | None:
        """Return why a value, or a row's, of the first rank with such a one wasn't recorded; None where all were."""
        documents = [each for call in self._by_rank.values() for each in (*call.rows, call.end) if each is not None]
        return next((each.about["missing"] for each in documents if "missing" in each.about), None)

    def arguments(self, rank: int = 0) -> Digest:
        """Return what is remembered of a rank's arguments: by parameter the paths in it, and what lay there."""
        found: Digest = self._of(rank).about["digest"]
        return found

    @property
    def rows(self) -> list[RecordedRow]:
        """Return the rows of a call whose rows end one by one, in the order in which the driver has got them."""
        rows = [(rank, each) for rank, call in self._by_rank.items() for each in call.rows]
        return [
            RecordedRow(each.about["row"], rank, each.about["ended"], RecordedError.of(each.about), each, self._find)
            for rank, each in in_order(rows, self._came)
        ]

    def _of(self, rank: int) -> RankCall:
        if rank not in self._by_rank:
            raise ConfigError(f"call {self.number} of {self.method} is of ranks {[*self.ranks]}, not of {rank}")
        return self._by_rank[rank]


@attrs.define(eq=False)
class RecordedRole:
    """A role as it was recorded.

    Attributes:
        name: Its name.
        group: Its group's.
        cls: Its class, as "module:Class".
        ranks: How many it had.
        seed: The runtime's.
        torn: The ranks of which the last entry isn't whole: they were killed, or write it just now.
        ended: Why nothing was recorded any more, before anybody had ended it; "" where nothing is known of that.
    """

    name: str
    group: str
    cls: str
    ranks: int
    seed: int
    torn: Sequence[int]
    ended: str
    _parts: Sequence[RankCalls] = attrs.field(repr=False)
    _find: Find = attrs.field(repr=False)
    _came: Mapping[int, Sequence[tuple[int, int]]] = attrs.field(repr=False)

    @classmethod
    def of(cls, folder: RoleFolder, find: Find) -> RecordedRole:
        """Return the role of a folder."""
        parts = [RankCalls(folder.path, rank) for rank in range(folder.ranks)]
        for part in parts:
            part.all()
        came = RowOrder.read(folder.path)
        torn = [rank for rank, part in enumerate(parts) if part.files.is_torn]
        ended = why_ended(folder.path)
        return cls(folder.role, folder.group, folder.cls, folder.ranks, folder.seed, torn, ended, parts, find, came)

    @cached_property
    def calls(self) -> list[RecordedCall]:
        """Return the role's calls, in order."""
        found: dict[int, dict[int, RankCall]] = {}
        for rank, part in enumerate(self._parts):
            for call in part.found.values():
                found.setdefault(call.about["seq"], {})[rank] = call
        return [RecordedCall.of(found[seq], self._find, self._came) for seq in sorted(found)]

    def __getitem__(self, method: str) -> list[RecordedCall]:
        """Return the calls of a method, in order."""
        found = [call for call in self.calls if call.method == method]
        if not found:
            has = dict.fromkeys(call.method for call in self.calls)
            raise ConfigError(f"no call of {self.name}.{method} was recorded: {', '.join(has) or 'none'} were")
        return found


class Recording(Mapping[str, RecordedRole]):
    """What roles gave, by "role", or "group.role" where several groups have one of that name.

    Attributes:
        folder: Where it lies.
    """

    def __init__(self, folder: Path, find: Find) -> None:
        """Use `load_recording`."""
        self.folder = folder
        folders = [RoleFolder.read(each.parent) for each in sorted(folder.glob(f"*/{ROLE}"))]
        names = [each.role for each in folders]
        self._folders = {
            each.role if names.count(each.role) == 1 else f"{each.group}.{each.role}": each for each in folders
        }
        self._find = find

    def __getitem__(self, name: str) -> RecordedRole:
        """Return a role, as far as it is recorded now.

        Raises:
            ConfigError: It isn't recorded.
            SerializationError: A file is damaged.
        """
        if name not in self._folders:
            hint = did_you_mean(name, self._folders)
            raise ConfigError(f"role {name!r} isn't in the recording {self.folder}: {', '.join(self)} are{hint}")
        return RecordedRole.of(self._folders[name], self._find)

    def __iter__(self) -> Iterator[str]:
        return iter(self._folders)

    def __len__(self) -> int:
        return len(self._folders)

    def __repr__(self) -> str:
        return f"<recording of {', '.join(self)} in {self.folder}>"


def _value(document: Document, find: Find, error: RecordedError | None) -> Any:
    if error is not None:
        raise SerializationError(f"it has raised {error.cls.partition(':')[2]}: {error.text}")
    if (why := document.about.get("missing")) is not None:
        raise SerializationError(f"it wasn't recorded: {why}")
    value = document.value(find)
    return value[0] if document.about.get("defaults") else value

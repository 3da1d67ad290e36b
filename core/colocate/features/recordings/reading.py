"""Implements `load_recording`, which gives access to recorded calls as Python objects."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from colocate._system.nearest import did_you_mean
from colocate._values.mesh import Mesh
from colocate.errors import ColocateError, ConfigError, DispatchError, SerializationError
from colocate.features.recordings.digests import Digest
from colocate.features.recordings.documents import Document, RankCall, RankCalls, sort_rows
from colocate.features.recordings.files import ROLE, RoleFolder, RowOrder, find_recording, read_end_reason
from colocate.features.recordings.values import Find, make_finder
from colocate.features.recordings.whole import JoinedCall, UnjoinableError, parse_method


def load_recording(folder: str | os.PathLike[str], *, packages: Collection[str] = ()) -> Recording:
    """Load the recorded calls of a run.

    Values are read on demand. No code of the recorded run is executed, because classes of records are looked up in
    imported modules.

    Args:
        folder: The folder of a run, or of a recording.
        packages: Further packages from which modules may be imported for classes.

    Raises:
        ConfigError: There is no recording.
    """
    return Recording(find_recording(folder), make_finder(packages))


@attrs.frozen
class RecordedError:
    """The error of a recorded call or row.

    Attributes:
        cls: The error's class, as "module:Class".
        text: The error's text.
        traceback: The traceback.
    """

    cls: str
    text: str
    traceback: str

    @classmethod
    def from_metadata(cls, about: Mapping[str, Any]) -> RecordedError | None:
        """Return the error in a document's metadata, or None if there is none."""
        error_entry = about.get("error")
        return None if error_entry is None else cls(error_entry["class"], error_entry["text"], error_entry["trace"])


@attrs.frozen
class RecordedRow:
    """A recorded row of a call.

    Attributes:
        index: The index in the caller's batch or result; None if unknown: the caller doesn't get rows of this rank, or
            an earlier rank's part is missing.
        rank: The rank on which the row ended.
        ended: The end of the row, in seconds of time.time().
        error: The row's error; None for none.
    """

    index: int | None
    rank: int
    ended: float
    error: RecordedError | None
    _document: Document = attrs.field(repr=False)
    _inputs: Document | None = attrs.field(repr=False)
    _find: Find = attrs.field(repr=False)

    @property
    def value(self) -> Any:
        """The row's value. `RecordedCall.value` lists the errors."""
        value = _read_value(self._document, self._find, self.error)
        # If a method yields rows, each row is recorded as a pair of index and item, without a digest.
        return value if self._document.about["digest"] else value[1]

    @property
    def inputs(self) -> Any:
        """The recorded argument of the row. `RecordedCall.inputs` lists the errors."""
        (value,) = _read_inputs(self._inputs, self._find).values()
        return value


@attrs.frozen
class RecordedCall:
    """A recorded call of a role.

    Attributes:
        method: The method.
        number: The number among the method's calls, from 0, counted from the start of the recording.
        place: The number among all calls of the role.
        seq: The number in the order of the group.
        ranks: The ranks that have answered.
        begun: The earliest start on a rank, in seconds of time.time().
        seconds: The duration until the last rank's end.
        nbytes: The call's bytes in files.
        error: The error of the first rank with one; None for none.
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
    _role: RecordedRole = attrs.field(repr=False)

    @classmethod
    def from_ranks(cls, by_rank: Mapping[int, RankCall], role: RecordedRole) -> RecordedCall:
        """Combine the recorded documents of all ranks into one call."""
        first = next(iter(by_rank.values()))
        abouts = [rank_call.about for rank_call in by_rank.values()]
        begun = min(about["begun"] for about in abouts)
        errors = (
            RecordedError.from_metadata(rank_call.end.about)
            for rank_call in by_rank.values()
            if rank_call.end is not None
        )
        return cls(
            first.method,
            first.number,
            first.place,
            first.about["seq"],
            tuple(by_rank),
            begun,
            max(about["ended"] for about in abouts) - begun,
            sum(rank_call.nbytes for rank_call in by_rank.values()),
            next(filter(None, errors), None),
            by_rank,
            role,
        )

    def joined(self) -> Any:
        """Join the ranks' results with the method's `collect`, and return the value that the caller got.

        Raises:
            ConfigError: The caller got no value, or a rank's result is missing, or the collect is a class of yours: see
                `values`.
            SerializationError: See `value`.
        """
        try:
            whole = self._joined_call()
            if whole.error_document is not None:
                raise SerializationError(f"it has raised {whole.error_text}")
            if not whole.spec.ends_in_rows:
                return whole.joined_value()
            rows = {row.index: row for row in self.rows if row.index is not None}
            count = max((part.about.get("valid", 0) for part in self._by_rank.values()), default=0)
            count = count if whole.spec.rows is not None else sum(map(len, whole.rows_by_rank().values()))
            if missing := [index for index in range(count) if index not in rows]:
                raise UnjoinableError(f"row {missing[0]} isn't there")
            return [rows[index].value for index in range(count)]
        except (UnjoinableError, DispatchError, KeyError) as error:
            why = error.message if isinstance(error, ColocateError) else str(error)
            raise ConfigError(f"call {self.number} of {self.method} can't be joined: {why}; see its values") from error

    def _joined_call(self) -> JoinedCall:
        """Return the call with the results of all ranks.

        Raises:
            UnjoinableError: The collect is a user's class.
        """
        role, folder = self._role, self._role._folder
        meshes = {name: Mesh(shape) for name, shape in folder.meshes.items()}
        spec, partition = parse_method(folder.methods[self.method]), role._partitions.get(self.seq)
        return JoinedCall(self._by_rank, role.ranks, meshes, partition, spec, role._find)

    def value(self, rank: int = 0) -> Any:
        """Return the recorded value of the call on a rank.

        Raises:
            ConfigError: The rank has no value: it took no part, the call has rows, or the recording ends amid the call.
            SerializationError: The value's type isn't recorded, or the call raised, or the class is unknown here.
        """
        end = self._rank_call(rank).end
        if end is None or "rows" in end.about:
            raise ConfigError(f"call {self.number} of {self.method} has no value of rank {rank}: see its rows")
        return _read_value(end, self._role._find, RecordedError.from_metadata(end.about))

    def inputs(self, rank: int = 0) -> dict[str, Any]:
        """Return the recorded arguments on a rank, by parameter. `rows` has the arguments of single rows.

        Raises:
            ConfigError: Arguments aren't recorded: name the role in `runtime.record(inputs=...)`, or
                `--record role:inputs`.
            SerializationError: See `value`.
        """
        documents = (document for document in self._rank_call(rank).inputs if "row" not in document.about)
        return _read_inputs(next(documents, None), self._role._find)

    def values(self) -> list[Any]:
        """Return the values of all ranks that took part in the call. `value` lists the errors."""
        return [self.value(rank) for rank in self.ranks]

    @property
    def missing(self) -> str | None:
        """The reason why a value or row of the call wasn't recorded, or None if all were recorded."""
        documents = [
            document for call in self._by_rank.values() for document in (*call.rows, call.end) if document is not None
        ]
        return next((document.about["missing"] for document in documents if "missing" in document.about), None)

    def arguments(self, rank: int = 0) -> Digest:
        """Return the digests of a rank's arguments: the path and a description of each part, by parameter."""
        digest: Digest = self._rank_call(rank).about["digest"]
        return digest

    @property
    def rows(self) -> list[RecordedRow]:
        """The rows in the order of their arrival at the driver, if the call's rows end one by one."""
        rows = [(rank, document) for rank, call in self._by_rank.items() for document in call.rows]
        if not rows:
            return []
        try:
            whole = self._joined_call()
            places = None if whole.spec.rows is not None else whole.rows_by_rank()
        except UnjoinableError:  # The indices of the rows are unknown.
            places = {}
        find = self._role._find
        return [
            RecordedRow(
                row := document.about["row"]
                if places is None
                else _find_index(places.get(rank, ()), document.about["row"]),
                rank,
                document.about["ended"],
                RecordedError.from_metadata(document.about),
                document,
                next((inputs for inputs in self._by_rank[rank].inputs if inputs.about.get("row", -1) == row), None),
                find,
            )
            for rank, document in sort_rows(rows, self._role._row_arrivals.get(self.seq))
        ]

    def _rank_call(self, rank: int) -> RankCall:
        if rank not in self._by_rank:
            raise ConfigError(f"call {self.number} of {self.method} is of ranks {[*self.ranks]}, not of {rank}")
        return self._by_rank[rank]


@attrs.define(eq=False)
class RecordedRole:
    """A recorded role.

    Attributes:
        name: The role's name.
        group: The group's name.
        cls: The role's class, as "module:Class".
        ranks: The number of ranks.
        seed: The runtime's seed.
        torn: The ranks with an incomplete last entry: killed, or still writing.
        ended: The reason why the recording ended early; "" if unknown.
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
    _row_arrivals: Mapping[int, Sequence[tuple[int, int]]] = attrs.field(repr=False)
    _partitions: Mapping[int, Sequence[Sequence[int]]] = attrs.field(repr=False)
    _folder: RoleFolder = attrs.field(repr=False)

    @classmethod
    def from_folder(cls, folder: RoleFolder, find: Find) -> RecordedRole:
        """Read the recorded role in a folder."""
        parts = [RankCalls(folder.path, rank) for rank in range(folder.ranks)]
        for part in parts:
            part.read_all()
        return cls(
            folder.role,
            folder.group,
            folder.cls,
            folder.ranks,
            folder.seed,
            [rank for rank, part in enumerate(parts) if part.files.is_torn],
            read_end_reason(folder.path),
            parts,
            find,
            RowOrder.read_rows(folder.path),
            RowOrder.read_rows(folder.path, "partition"),
            folder,
        )

    @cached_property
    def calls(self) -> list[RecordedCall]:
        """All calls of the role, ordered by their number in the group (`seq`)."""
        by_seq: dict[int, dict[int, RankCall]] = {}
        for rank, part in enumerate(self._parts):
            for call in part.calls.values():
                by_seq.setdefault(call.about["seq"], {})[rank] = call
        return [RecordedCall.from_ranks(by_seq[seq], self) for seq in sorted(by_seq)]

    def __getitem__(self, method: str) -> list[RecordedCall]:
        """Return a method's calls, ordered by their number in the group (`seq`)."""
        calls = [call for call in self.calls if call.method == method]
        if not calls:
            has = dict.fromkeys(call.method for call in self.calls)
            raise ConfigError(f"no call of {self.name}.{method} was recorded: {', '.join(has) or 'none'} were")
        return calls


class Recording(Mapping[str, RecordedRole]):
    """All roles of a recording. The keys are "role", or "group.role" if several groups have such a role.

    Attributes:
        folder: The recording's folder.
    """

    def __init__(self, folder: Path, find: Find) -> None:
        """Create a recording. Users call `load_recording` instead."""
        self.folder = folder
        folders = [RoleFolder.from_folder(item.parent) for item in sorted(folder.glob(f"*/{ROLE}"))]
        names = [item.role for item in folders]
        self._folders = {
            item.role if names.count(item.role) == 1 else f"{item.group}.{item.role}": item for item in folders
        }
        self._find = find

    def __getitem__(self, name: str) -> RecordedRole:
        """Return a role with the calls that are recorded so far.

        Raises:
            ConfigError: The role isn't recorded.
            SerializationError: A file is damaged.
        """
        if name not in self._folders:
            hint = did_you_mean(name, self._folders)
            raise ConfigError(f"role {name!r} isn't in the recording {self.folder}: {', '.join(self)} are{hint}")
        return RecordedRole.from_folder(self._folders[name], self._find)

    def __iter__(self) -> Iterator[str]:
        return iter(self._folders)

    def __len__(self) -> int:
        return len(self._folders)

    def __repr__(self) -> str:
        return f"<recording of {', '.join(self)} in {self.folder}>"


def _read_value(document: Document, find: Find, error: RecordedError | None) -> Any:
    if error is not None:
        raise SerializationError(f"it has raised {error.cls.partition(':')[2]}: {error.text}")
    if (why := document.about.get("missing")) is not None:
        raise SerializationError(f"it wasn't recorded: {why}")
    value = document.read_value(find)
    return value[0] if document.about.get("defaults") else value


def _read_inputs(document: Document | None, find: Find) -> dict[str, Any]:
    if document is None:
        raise ConfigError(
            "what it was given isn't recorded: name the role in runtime.record(inputs=...), or `--record role:inputs`"
        )
    arguments: dict[str, Any] = _read_value(document, find, None)
    return arguments


def _find_index(own: Sequence[int], row: int) -> int | None:
    return own[row] if row < len(own) else None

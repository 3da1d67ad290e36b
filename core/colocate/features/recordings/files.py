"""The files of a recording: a folder for each role, with files of documents for each rank.

    FOLDER/GROUP.ROLE/role.json
    FOLDER/GROUP.ROLE/rank-0.0000.calls, rank-0.0001.calls ...

The files are readable while they grow. If a rank was killed, its last document may be incomplete. Readers skip it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import attrs

from colocate._system.files import GrowingFile, open_file, write_atomically
from colocate._system.jobs import JobThread, format_error, get_message, report_exception
from colocate._system.nearest import did_you_mean
from colocate._system.numbers import format_size
from colocate.errors import ConfigError, SerializationError
from colocate.features.recordings.values import digest_bytes, seal_document

FORMAT = 3
"""The version of documents, and of the files beside them."""
IN_RUN = "recording"
"""The name of the recording's folder in a run's folder."""
ROLE = "role.json"
STEPS = "steps.jsonl"
_FULL, _ENDED, _ROWS = "ended", "ended.txt", "rows.jsonl"
_FILE_BYTES = 256 << 20
_QUEUED_BYTES = 256 << 20
_CHECK_BYTES = 16 << 20  # A rank writes this many bytes between checks of the recording's total size.
_MOST_RANKS = 1 << 16
_MOST_WHOLE = 1 << 26  # Files that are read in one piece are read up to this many bytes.


def damaged_error(path: Path, byte: int, why: object) -> SerializationError:
    """Return an error for a damaged file, with the position and the reason."""
    words = (get_message if isinstance(why, ValueError) else format_error)(why) if isinstance(why, Exception) else why
    return SerializationError(f"{path} is damaged at byte {byte}: {words}")


def open_recording(path: Path) -> BufferedReader:
    """Open a file of a recording for reading.

    Raises:
        FileNotFoundError: The file is missing.
        SerializationError: The path can't be read, or is no file.
    """
    try:
        return open_file(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise SerializationError(f"{path} can't be read: {get_message(error)}") from error


def to_line(told: Mapping[str, Any]) -> str:
    """Return a line of JSON with an additional digest of the contents."""
    return json.dumps({**told, "digest": digest_bytes(json.dumps(told).encode())}) + "\n"


def read_lines(file: Path, check: Callable[[dict[str, Any]], object]) -> list[dict[str, Any]]:
    """Return the JSON objects in a file's lines, without an incomplete last line. A missing file has no lines.

    Args:
        file: The file.
        check: Raises an error for an object with wrong contents.

    Raises:
        SerializationError: The file is damaged.
    """
    try:
        with open_recording(file) as lines:
            entries, at = list[dict[str, Any]](), 0
            for line in lines:
                # Skip a last line that was written only in part.
                if line.endswith(b"\n") or (b'"digest"' in line and line[-2:-1] == b"}"):
                    entries.append(_parse_line(line, file, at, check))
                at += len(line)
            return entries
    except FileNotFoundError:
        return []


def _read_object(file: Path, check: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the JSON object in a file that was written in one piece. `open_recording` and `read_lines` list errors."""
    with open_recording(file) as lines:
        return _parse_line(lines.read(_MOST_WHOLE), file, 0, check)


def _parse_line(line: bytes, file: Path, at: int, check: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(line)
        digest = entry.pop("digest", None)
        if digest not in (None, digest_bytes(json.dumps(entry).encode())):
            raise ValueError("these aren't the words that were written")
        check(entry)
        if digest is None:
            raise ValueError("it has no digest")
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from None
    except json.JSONDecodeError as error:
        raise damaged_error(file, at + error.pos, error) from error
    except Exception as error:  # The contents of a line may be anything.
        raise damaged_error(file, at, error) from error
    return entry


def find_recording(given: str | os.PathLike[str]) -> Path:
    """Find the recording in a folder, which is the recording's own folder or the folder of a run.

    Raises:
        ConfigError: The folder is missing, or has no recording.
    """
    folder = Path(os.path.abspath(given))
    recording = folder / IN_RUN if (folder / IN_RUN).is_dir() else folder
    if not recording.is_dir():
        raise ConfigError(f"there is no recording in {folder}: there is no such folder")
    if not any(recording.glob(f"*/{ROLE}")):
        raise ConfigError(f"there is no recording in {folder}: it was to have a folder for each role, with {ROLE}")
    return recording


@attrs.frozen
class RoleFolder:
    """The folder of a recorded role, and the role's metadata.

    Attributes:
        path: The folder.
        group: The group's name.
        role: The role's name.
        cls: The role's class, as "module:Class".
        ranks: The number of ranks.
        seed: The runtime's seed.
        methods: The metadata of the role's methods, by name.
        meshes: The sizes of the meshes' axes, by name.
    """

    path: Path
    group: str
    role: str
    cls: str
    ranks: int
    seed: int
    methods: Mapping[str, Mapping[str, Any]]
    meshes: Mapping[str, Mapping[str, int]]

    def create_folder(self) -> None:
        """Make the folder.

        Raises:
            ConfigError: The folder exists already, or can't be made.
        """
        entry = {key: value for key, value in attrs.asdict(self).items() if key != "path"}
        try:
            self.path.mkdir(parents=True)
            write_atomically(self.path / ROLE, to_line({"format": FORMAT, **entry}))
        except FileExistsError:
            raise ConfigError(f"{self.path} is there already: give the recording a folder of its own") from None
        except OSError as error:
            raise ConfigError(f"the recording's folder {self.path} can't be made: {format_error(error)}") from error

    @classmethod
    def from_folder(cls, path: Path) -> RoleFolder:
        """Read the metadata of a role's folder.

        Raises:
            ConfigError: Another version made the recording.
            SerializationError: The file is damaged.
        """
        stored = _read_object(path / ROLE, _check_role_entry)
        del stored["format"]
        return cls(path, **stored)

    @classmethod
    def find(cls, given: str | os.PathLike[str], group: str, role: str) -> RoleFolder:
        """Return a role's folder in a recording. If the recording lacks this group, the role's name must be unique.

        Raises:
            ConfigError: There is no such role, or several.
        """
        role_folders = {path.parent.name: path.parent for path in find_recording(given).glob(f"*/{ROLE}")}
        named = [name for name in role_folders if name == f"{group}.{role}"] or [
            name for name in role_folders if name.rpartition(".")[2] == role
        ]
        if len(named) != 1:
            hint = did_you_mean(role, [name.rpartition(".")[2] for name in role_folders])
            quantity = "several" if named else "no"
            has = ", ".join(sorted(role_folders))
            raise ConfigError(f"the recording in {given} has {quantity} role {role!r}: it has {has}{hint}")
        return cls.from_folder(role_folders[named[0]])


_TOLD = {"collect", "rows", "ends_in_rows"}  # The metadata of a method has these keys.


def _check_role_entry(told: Mapping[str, Any]) -> None:
    if told["format"] != FORMAT:
        when = "an earlier" if told["format"] < FORMAT else "a later"
        raise ConfigError(
            f"it was recorded by {when} version of colocate, in format {told['format']}; this one reads format "
            f"{FORMAT}: record it anew, or read it with that version"
        )
    kinds = {"group": str, "role": str, "cls": str, "ranks": int, "seed": int, "methods": dict, "meshes": dict}
    wrong = next((name for name, kind in kinds.items() if not isinstance(told[name], kind)), None)
    if wrong is None and not all(type(size) is int for shape in told["meshes"].values() for size in shape.values()):
        wrong = "meshes"
    if wrong is None and not all(
        len(method["collect"]) == 2 and {*method} == _TOLD for method in told["methods"].values()
    ):
        wrong = "methods"
    if wrong is not None or not 0 < told["ranks"] <= _MOST_RANKS or told.keys() != {"format", *kinds}:
        raise ValueError(f"{wrong or 'ranks'} is {told.get(wrong or 'ranks')!r:.60}")


class Writer:
    """Writes a rank's documents to files on a separate thread.

    Attributes:
        has_ended: Whether writing has stopped.
    """

    def __init__(self, folder: Path, rank: int, limit: int | None, tell: Callable[[str], object]) -> None:
        """Prepare for writing to a role's `folder`.

        `limit` is the limit of the complete recording in bytes. `tell` receives the reason if writing stops early.
        """
        self._folder, self._rank, self._limit, self._tell = folder, rank, limit, tell
        self._thread = JobThread(f"colocate-recording-{folder.name}-{rank}", self._on_error)
        self._room_condition = threading.Condition()
        self._queued = self._number = self._size = self._unchecked_bytes = 0
        self._file: FileIO | None = None
        self.has_ended = False

    def add_document(self, pieces: Sequence[Any], length: int) -> None:
        """Queue a document for writing, and block while the queue is full. Do nothing if writing has stopped."""
        with self._room_condition:
            self._room_condition.wait_for(
                lambda: self.has_ended or not self._queued or self._queued + length <= _QUEUED_BYTES
            )
            if self.has_ended:
                return
            self._queued += length
        self._thread.call_soon(partial(self._write_pieces, pieces, length))

    def close(self, within_s: float | None = None) -> None:
        """Write the queued documents within `within_s` seconds, or within a worker's default timeout, and stop."""
        is_over = self._thread.close(within_s)
        self._stop_writing()
        if is_over and self._file is not None:
            self._file.close()
            self._file = None

    # -- on the writer's thread

    def _write_pieces(self, pieces: Sequence[Any], length: int) -> None:
        try:
            if not self.has_ended and self._has_room(length):
                file = self._next_file()
                begin = file.tell()
                try:
                    for piece in seal_document(pieces):
                        rest = memoryview(piece).cast("B")
                        while rest:
                            rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(begin)
                    raise
                self._size += length
                self._unchecked_bytes += length
        finally:
            with self._room_condition:
                self._queued -= length
                self._room_condition.notify_all()

    def _next_file(self) -> FileIO:
        if self._file is None or self._size >= _FILE_BYTES:
            if self._file is not None:
                self._file.close()
            self._file = FileIO(self._folder / f"rank-{self._rank}.{self._number:04}.calls", "x")
            self._number, self._size = self._number + 1, 0
        return self._file

    def _has_room(self, length: int) -> bool:
        if self._limit is None:
            return True
        mark = self._folder.parent / _FULL
        if mark.exists():  # Another rank has noticed that the recording has reached the limit.
            self._stop_writing()
            return False
        if self._unchecked_bytes + length >= min(_CHECK_BYTES, self._limit // 64) or not self._number:
            self._unchecked_bytes = 0
            if recording_size(self._folder.parent) + length > self._limit:
                self._stop_writing()
                mark.touch()
                self._tell(
                    f"the recording in {self._folder.parent} has {format_size(self._limit)}, its limit: nothing is "
                    "recorded any more, and the run goes on"
                )
                return False
        return True

    def _on_error(self, error: BaseException) -> None:
        self._stop_writing()
        self._tell(f"nothing of {self._folder.name}, rank {self._rank}, is recorded any more: {format_error(error)}")

    def _stop_writing(self) -> None:
        with self._room_condition:
            self.has_ended = True
            self._room_condition.notify_all()


def mark_end(folder: Path, why: str) -> None:
    """Write a file to a role's folder with the reason why the recording has ended."""
    write_atomically(folder / _ENDED, to_line({"ended": why}))


def read_end_reason(folder: Path) -> str:
    """Return the reason why a recording has ended, or "" if unknown."""
    if (folder.parent / _FULL).exists():
        return "it has reached its limit"
    try:
        return str(_read_object(folder / _ENDED, lambda told: str(told["ended"]))["ended"])
    except FileNotFoundError:
        return ""


def describe_end(folder: Path) -> str:
    """Return the reason why a recording has ended as a clause for an error text, or "" if unknown."""
    return f", as {why}" if (why := read_end_reason(folder)) else ""


class RowOrder:
    """Writes the order or the partition of each call's rows to a file, on a separate thread.

    For rows that end one by one, a line has their order of arrival at the driver. For a partition that the driver has
    chosen, a line has the rows of each rank.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = JobThread(f"colocate-recording-{folder.name}-rows", lambda error: report_exception())

    def add_call(self, seq: int, **what: Any) -> None:
        """Queue the line of a call for writing, without blocking.

        `what` is `rows`, as pairs of rank and index in order of arrival, or `partition`, with the rows of each rank.
        """
        self._thread.call_soon(partial(self._write_line, to_line({"seq": seq, **what})))

    def close(self) -> None:
        """Write the queued lines, and stop."""
        self._thread.close()

    def _write_line(self, line: str) -> None:
        # Open the file for each line, because a call may end, and add a line, after `close`.
        with closing(GrowingFile(self._folder / _ROWS)) as file:
            file.append_text(line)

    @classmethod
    def read_rows(cls, folder: Path, what: str = "rows") -> Mapping[int, Sequence[Any]]:
        """Return the written rows or partitions by call number. `read_lines` lists the errors."""
        stored = read_lines(folder / _ROWS, _check_rows)
        return {entry["seq"]: [*map(tuple, entry[what])] for entry in stored if what in entry}


def _check_rows(told: Mapping[str, Any]) -> None:
    rows = [*told.get("rows", ())]
    numbers = [told["seq"], *(number for pair in (*rows, *told.get("partition", ())) for number in pair)]
    if not all(type(number) is int for number in numbers) or any(len(pair) != 2 for pair in rows):
        raise ValueError("its numbers of rows aren't such")


def recording_size(folder: Path) -> int:
    """Return the total size of a recording's documents, in bytes."""
    return sum(path.stat().st_size for path in folder.glob("*/*.calls"))

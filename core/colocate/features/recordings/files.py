"""The files of a recording: a folder for each role, in which each rank has files of documents, one after the other.

    FOLDER/GROUP.ROLE/role.json
    FOLDER/GROUP.ROLE/rank-0.0000.calls, rank-0.0001.calls ...

They are readable while they grow. Of a rank that was killed the last document may be torn: it isn't read.
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

from colocate._system.files import GrowingFile, open_file, write_whole
from colocate._system.jobs import JobThread, error_text, message_of, report_exception
from colocate._system.nearest import did_you_mean
from colocate._system.numbers import size_text
from colocate.errors import ConfigError, SerializationError
from colocate.features.recordings.values import digest_of_bytes, seal

FORMAT = 3
"""Of documents, and of the files beside them."""
IN_RUN = "recording"
"""What the folder of a recording is called in that of a run."""
ROLE = "role.json"
STEPS = "steps.jsonl"
_FULL, _ENDED, _ROWS = "ended", "ended.txt", "rows.jsonl"
_FILE_BYTES = 256 << 20
_QUEUED_BYTES = 256 << 20
_LOOKS_BYTES = 16 << 20  # what a rank writes until it looks again how large the whole is
_MOST_RANKS = 1 << 16
_MOST_WHOLE = 1 << 26  # bytes of a file


def damaged(path: Path, byte: int, why: object) -> SerializationError:
    """Return the error of a damaged file."""
    words = (message_of if isinstance(why, ValueError) else error_text)(why) if isinstance(why, Exception) else why
    return SerializationError(f"{path} is damaged at byte {byte}: {words}")


def opened(path: Path) -> BufferedReader:
    """Open a file of a recording to read.

    Raises:
        FileNotFoundError: It isn't there.
        SerializationError: It can't be read, or is no file.
    """
    try:
        return open_file(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise SerializationError(f"{path} can't be read: {message_of(error)}") from error


def to_line(told: Mapping[str, Any]) -> str:
    """Return a line of JSON with a digest of the other keys."""
    return json.dumps({**told, "digest": digest_of_bytes(json.dumps(told).encode())}) + "\n"


def lines_of(file: Path, check: Callable[[dict[str, Any]], object]) -> list[dict[str, Any]]:
    """Return the objects of a file's lines, none where there is no file; a torn last line isn't read.

    Args:
        file: The file.
        check: Raises an error of an object that isn't what a line has.

    Raises:
        SerializationError: The file is damaged.
    """
    try:
        with opened(file) as lines:
            found, at = list[dict[str, Any]](), 0
            for line in lines:
                if line.endswith(b"\n") or (b'"digest"' in line and line[-2:-1] == b"}"):  # else the line is torn
                    found.append(_from_line(line, file, at, check))
                at += len(line)
            return found
    except FileNotFoundError:
        return []


def _whole(file: Path, check: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the object of a file that was written as a whole. Errors: as of `opened` and `lines_of`."""
    with opened(file) as lines:
        return _from_line(lines.read(_MOST_WHOLE), file, 0, check)


def _from_line(line: bytes, file: Path, at: int, check: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(line)
        digest = told.pop("digest", None)
        if digest not in (None, digest_of_bytes(json.dumps(told).encode())):
            raise ValueError("these aren't the words that were written")
        check(told)
        if digest is None:
            raise ValueError("it has no digest")
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from None
    except json.JSONDecodeError as error:
        raise damaged(file, at + error.pos, error) from error
    except Exception as error:  # whatever somebody else's words lead to
        raise damaged(file, at, error) from error
    return told


def folder_of(given: str | os.PathLike[str]) -> Path:
    """Return where a recording lies, given its folder, or that of its run.

    Raises:
        ConfigError: There is none.
    """
    folder = Path(os.path.abspath(given))
    found = folder / IN_RUN if (folder / IN_RUN).is_dir() else folder
    if not found.is_dir():
        raise ConfigError(f"there is no recording in {folder}: there is no such folder")
    if not any(found.glob(f"*/{ROLE}")):
        raise ConfigError(f"there is no recording in {folder}: it was to have a folder for each role, with {ROLE}")
    return found


@attrs.frozen
class RoleFolder:
    """Where the calls of a role are recorded, and what is told of it.

    Attributes:
        path: The folder.
        group: The group's name.
        role: The role's name.
        cls: Its class, as "module:Class".
        ranks: How many it had.
        seed: The runtime's.
        methods: What is told of those that it has, by name.
        meshes: The sizes of their axes, by name.
    """

    path: Path
    group: str
    role: str
    cls: str
    ranks: int
    seed: int
    methods: Mapping[str, Mapping[str, Any]]
    meshes: Mapping[str, Mapping[str, int]]

    def begin(self) -> None:
        """Make the folder.

        Raises:
            ConfigError: It is there already, or can't be made.
        """
        told = {key: value for key, value in attrs.asdict(self).items() if key != "path"}
        try:
            self.path.mkdir(parents=True)
            write_whole(self.path / ROLE, to_line({"format": FORMAT, **told}))
        except FileExistsError:
            raise ConfigError(f"{self.path} is there already: give the recording a folder of its own") from None
        except OSError as error:
            raise ConfigError(f"the recording's folder {self.path} can't be made: {error_text(error)}") from error

    @classmethod
    def read(cls, path: Path) -> RoleFolder:
        """Return what is told in a folder.

        Raises:
            ConfigError: It was recorded by another version.
            SerializationError: It is damaged.
        """
        told = _whole(path / ROLE, _check_role)
        del told["format"]
        return cls(path, **told)

    @classmethod
    def find(cls, given: str | os.PathLike[str], group: str, role: str) -> RoleFolder:
        """Return that of a role: of this group's, else of the only one of its name.

        Raises:
            ConfigError: It isn't there.
        """
        found = {each.parent.name: each.parent for each in folder_of(given).glob(f"*/{ROLE}")}
        named = [name for name in found if name == f"{group}.{role}"] or [
            name for name in found if name.rpartition(".")[2] == role
        ]
        if len(named) != 1:
            hint = did_you_mean(role, [name.rpartition(".")[2] for name in found])
            what = "several" if named else "no"
            has = ", ".join(sorted(found))
            raise ConfigError(f"the recording in {given} has {what} role {role!r}: it has {has}{hint}")
        return cls.read(found[named[0]])


_TOLD = {"collect", "rows", "ends_in_rows"}  # of a method


def _check_role(told: Mapping[str, Any]) -> None:
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
    if wrong is None and not all(len(each["collect"]) == 2 and {*each} == _TOLD for each in told["methods"].values()):
        wrong = "methods"
    if wrong is not None or not 0 < told["ranks"] <= _MOST_RANKS or told.keys() != {"format", *kinds}:
        raise ValueError(f"{wrong or 'ranks'} is {told.get(wrong or 'ranks')!r:.60}")


class Writer:
    """Writes what a rank records, on a thread of its own, while what waits isn't more than some memory.

    Attributes:
        values: The bytes that were given to it.
    """

    def __init__(self, folder: Path, rank: int, limit: int | None, tell: Callable[[str], object]) -> None:
        """Begin. Args: limit: Bytes of the whole recording. tell: Told in words why it has ended before its end."""
        self._folder, self._rank, self._limit, self._tell = folder, rank, limit, tell
        self._thread = JobThread(f"colocate-recording-{folder.name}-{rank}", self._failed)
        self._room = threading.Condition()
        self._queued = self._number = self._size = self._unlooked = 0
        self._file: FileIO | None = None
        self.ended = False

    def add(self, pieces: Sequence[Any], length: int) -> None:
        """Write a document some time soon; wait while too much is to be written. Nothing once it has ended."""
        with self._room:
            self._room.wait_for(lambda: self.ended or not self._queued or self._queued + length <= _QUEUED_BYTES)
            if self.ended:
                return
            self._queued += length
        self._thread.soon(partial(self._write, pieces, length))

    def close(self, within_s: float | None = None) -> None:
        """Write what is left. Args: within_s: Seconds that it may take; None for those of a worker's end."""
        is_over = self._thread.close(within_s)
        self._end()
        if is_over and self._file is not None:
            self._file.close()
            self._file = None

    # -- on its thread

    def _write(self, pieces: Sequence[Any], length: int) -> None:
        try:
            if not self.ended and self._has_room(length):
                file = self._next_file()
                begin = file.tell()
                try:
                    for piece in seal(pieces):
                        left = memoryview(piece).cast("B")
                        while left:
                            left = left[file.write(left) :]
                except OSError:
                    file.truncate(begin)
                    raise
                self._size += length
                self._unlooked += length
        finally:
            with self._room:
                self._queued -= length
                self._room.notify_all()

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
        if mark.exists():  # another rank has found it full
            self._end()
            return False
        if self._unlooked + length >= min(_LOOKS_BYTES, self._limit // 64) or not self._number:
            self._unlooked = 0
            if size_of(self._folder.parent) + length > self._limit:
                self._end()
                mark.touch()
                self._tell(
                    f"the recording in {self._folder.parent} has {size_text(self._limit)}, its limit: nothing is "
                    "recorded any more, and the run goes on"
                )
                return False
        return True

    def _failed(self, error: BaseException) -> None:
        self._end()
        self._tell(f"nothing of {self._folder.name}, rank {self._rank}, is recorded any more: {error_text(error)}")

    def _end(self) -> None:
        with self._room:
            self.ended = True
            self._room.notify_all()


def mark_end(folder: Path, why: str) -> None:
    """Note in a role's folder why nothing is recorded any more."""
    write_whole(folder / _ENDED, to_line({"ended": why}))


def why_ended(folder: Path) -> str:
    """Return that; "" where nobody has noted anything."""
    if (folder.parent / _FULL).exists():
        return "it has reached its limit"
    try:
        return str(_whole(folder / _ENDED, lambda told: str(told["ended"]))["ended"])
    except FileNotFoundError:
        return ""


def as_ended(folder: Path) -> str:
    """Return that, as the end of a sentence."""
    return f", as {why}" if (why := why_ended(folder)) else ""


class RowOrder:
    """Writes what only the driver knows of calls' rows: a line for each call, on a thread of its own.

    That is in which order it has got those that end one by one, and which ones each rank had, where these were chosen.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = JobThread(f"colocate-recording-{folder.name}-rows", lambda error: report_exception())

    def add(self, seq: int, **what: Any) -> None:
        """Add a call's: `rows`, by rank and index, as they came; or `partition`, by rank. This waits for nothing."""
        self._thread.soon(partial(self._write, to_line({"seq": seq, **what})))

    def close(self) -> None:
        """Write what is left."""
        self._thread.close()

    def _write(self, line: str) -> None:
        with closing(GrowingFile(self._folder / _ROWS)) as file:  # a call may end when nobody closes one any more
            file.add(line)

    @classmethod
    def read(cls, folder: Path, what: str = "rows") -> Mapping[int, Sequence[Any]]:
        """Return what was written, by call. Errors: as of `lines_of`."""
        told = lines_of(folder / _ROWS, _check_rows)
        return {each["seq"]: [*map(tuple, each[what])] for each in told if what in each}


def _check_rows(told: Mapping[str, Any]) -> None:
    rows = [*told.get("rows", ())]
    numbers = [told["seq"], *(number for each in (*rows, *told.get("partition", ())) for number in each)]
    if not all(type(number) is int for number in numbers) or any(len(each) != 2 for each in rows):
        raise ValueError("its numbers of rows aren't such")


def size_of(folder: Path) -> int:
    """Return the bytes of a recording."""
    return sum(each.stat().st_size for each in folder.glob("*/*.calls"))

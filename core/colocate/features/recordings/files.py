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
from io import FileIO
from pathlib import Path
from typing import Any

import attrs

from colocate._system.files import GrowingFile, json_of, write_whole
from colocate._system.jobs import JobThread, error_text, report_exception
from colocate._system.nearest import did_you_mean
from colocate._system.numbers import size_text
from colocate.errors import ConfigError, SerializationError

IN_RUN = "recording"
"""What the folder of a recording is called in that of a run."""
ROLE = "role.json"
STEPS = "steps.jsonl"
_FULL, _ENDED, _ROWS = "ended", "ended.txt", "rows.jsonl"
_FILE_BYTES = 256 << 20
_QUEUED_BYTES = 256 << 20
_LOOKS_BYTES = 16 << 20  # what a rank writes until it looks again how large the whole is


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
        methods: Those that it has.
        meshes: The sizes of their axes, by name.
    """

    path: Path
    group: str
    role: str
    cls: str
    ranks: int
    seed: int
    methods: Sequence[str]
    meshes: Mapping[str, Mapping[str, int]]

    def begin(self) -> None:
        """Make the folder.

        Raises:
            ConfigError: It is there already, or can't be made.
        """
        told = {key: value for key, value in attrs.asdict(self).items() if key != "path"}
        try:
            self.path.mkdir(parents=True)
            write_whole(self.path / ROLE, json.dumps({**told, "format": 1}))
        except FileExistsError:
            raise ConfigError(f"{self.path} is there already: give the recording a folder of its own") from None
        except OSError as error:
            raise ConfigError(f"the recording's folder {self.path} can't be made: {error_text(error)}") from error

    @classmethod
    def read(cls, path: Path) -> RoleFolder:
        """Return what is told in a folder.

        Raises:
            ConfigError: It is no such folder.
        """
        try:
            told = json_of(path / ROLE)
            if told.pop("format") != 1:
                raise ConfigError(f"{path} was recorded by a later version of colocate")
            return cls(path, **told)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path / ROLE} can't be read: {error_text(error)}") from error

    @classmethod
    def find(cls, given: str | os.PathLike[str], group: str, role: str) -> RoleFolder:
        """Return that of a role: of this group's, else of the only one of its name.

        Raises:
            ConfigError: It isn't there.
        """
        found = {each.parent.name: each.parent for each in folder_of(given).glob(f"*/{ROLE}")}
        named = [name for name in found if name == f"{group}.{role}"] or [
            name for name in found if name.partition(".")[2] == role
        ]
        if len(named) != 1:
            hint = did_you_mean(role, [name.partition(".")[2] for name in found])
            what = "several" if named else "no"
            has = ", ".join(sorted(found))
            raise ConfigError(f"the recording in {given} has {what} role {role!r}: it has {has}{hint}")
        return cls.read(found[named[0]])


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
                    for piece in pieces:
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
    (folder / _ENDED).write_text(why, encoding="utf-8")


def why_ended(folder: Path) -> str:
    """Return that; "" where nobody has noted anything."""
    if (folder.parent / _FULL).exists():
        return "it has reached its limit"
    file = folder / _ENDED
    return file.read_text(encoding="utf-8") if file.exists() else ""


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
        self._thread.soon(partial(self._write, json.dumps({"seq": seq, **what}) + "\n"))

    def close(self) -> None:
        """Write what is left."""
        self._thread.close()

    def _write(self, line: str) -> None:
        with closing(GrowingFile(self._folder / _ROWS)) as file:  # a call may end when nobody closes one any more
            file.add(line)

    @classmethod
    def read(cls, folder: Path, what: str = "rows") -> Mapping[int, Sequence[Any]]:
        """Return what was written, by call. Errors: as of `lines_of`."""
        told = lines_of(folder / _ROWS, "seq")
        return {each["seq"]: [*map(tuple, each[what])] for each in told if what in each}


def lines_of(file: Path, key: str) -> list[dict[str, Any]]:
    """Return the objects of a file's lines, all of which have a key; a torn last line isn't read.

    Raises:
        SerializationError: The file is damaged.
    """
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            try:
                found.append(json.loads(line))
                found[-1][key]
            except (ValueError, TypeError, KeyError, IndexError) as error:
                raise SerializationError(f"{file} is damaged at line {number}: {error_text(error)}") from error
    return found


def size_of(folder: Path) -> int:
    """Return the bytes of a recording."""
    return sum(each.stat().st_size for each in folder.glob("*/*.calls"))

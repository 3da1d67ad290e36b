"""Folders and files that are complete, or not there; and files that grow by whole pieces."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

_OLD, _PART = ".old-", ".part-"  # prefixes of the folders that are replaced or written
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux
_MOST_JSON = 2**26  # bytes of a file
_numbers = itertools.count(1)
_naming = threading.Lock()


@contextlib.contextmanager
def atomic_folder(final: Path, naming: AbstractContextManager[object] | None = None) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends well, and is removed otherwise.

    Several threads, processes, or handlers of signals, may write folders of one name at once: the last one to end well
    stays. A folder of that name is replaced in one step. Some file systems (NFS) can't do that: readers look in both
    `places` there.

    Args:
        final: The name. What is there already is replaced as a whole.
        naming: Is entered while the folder gets its name; when that raises, it gets none.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    tidy(final.parent, re.escape(final.name))
    part = _part(final)
    part.mkdir()
    try:
        yield part
        for path in [*part.rglob("*"), part]:  # on the disk before the name says that it is complete
            _sync(path)
        _name(part, final, naming)
    finally:
        _discard(part)  # half a folder, or what was replaced
    _sync(final.parent)


def places(final: Path) -> tuple[Path, Path]:
    """Return where the complete folder of a name may be: under its name, or beside it while another one replaces it.

    A replacement that was cut short leaves it beside. Who looks may be overtaken, and looks twice.
    """
    return final, final.with_name(f"{_OLD}{final.name}")


def complete_folders(parent: Path) -> dict[str, Path]:
    """Return the complete folders in a folder by name, and where each lies: one of `places`."""
    if not parent.is_dir():
        return {}
    with nobody_renames(parent / _OLD):
        names = os.listdir(parent)
    beside = {name.removeprefix(_OLD): parent / name for name in names if name.startswith(_OLD)}
    return beside | {name: parent / name for name in names if not name.startswith((_OLD, _PART))}


def remove_folder(final: Path) -> None:
    """Remove a complete folder. A removal that is cut short leaves no half of a folder under its name."""
    doomed = final.rename(_part(final))
    _remove(doomed)


def tidy(parent: Path, name: str = ".*", *, is_alone: bool = False) -> None:
    """Finish the replacements of killed writers in a folder, and remove their half folders.

    Args:
        parent: The folder.
        name: A pattern of the names that are tidied.
        is_alone: Whether no process of another machine writes there. Its half folders are removed then, too.
    """
    import psutil  # an import from disk, unlike our own modules: on failure only this call fails

    replaced = re.compile(f"{re.escape(_OLD)}(?P<name>{name})")
    written = re.compile(rf"{re.escape(_PART)}{name}-(?P<pid>\d+)-\d+x?(?:@(?P<host>.*))?")
    with nobody_renames(parent / _OLD):
        for path in list(parent.iterdir()):
            if match := replaced.fullmatch(path.name):
                _settle(path.with_name(match["name"]))
            elif match := written.fullmatch(path.name):
                is_here = match["host"] in (None, socket.gethostname())
                if not psutil.pid_exists(int(match["pid"])) if is_here else is_alone:
                    _remove(path)


@contextlib.contextmanager
def nobody_renames(final: Path) -> Iterator[None]:
    """A block in which nobody else gives a name in this folder's parent: no thread, and no process of this machine.

    Across machines nothing is locked, nor where a file system knows no locks.
    """
    with _naming, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without such locks, or no parent
            descriptor = os.open(final.parent, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)  # a fork may have the descriptor, too
        yield


def write_whole(path: Path, text: str) -> None:
    """Write a file, all of it or nothing."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # a user's text may have lone surrogates
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def open_file(path: Path) -> BufferedReader:
    """Open a file to read.

    Raises:
        OSError: It can't be read.
        ValueError: It is no file but a pipe or a device, which may never end.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - the caller's
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError("it is no file, but a pipe or a device")


def json_of(path: Path) -> Any:
    """Return what a file of JSON says.

    Raises:
        OSError: It can't be read.
        ValueError: It isn't JSON, or too much of that, or no file; see `open_file`.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_JSON:
            raise ValueError(f"{size:,} bytes; at most {_MOST_JSON:,}")
        text = file.read(_MOST_JSON)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too many lists and mappings inside each other") from None


def _name(part: Path, final: Path, naming: AbstractContextManager[object] | None) -> None:
    """Exchange the two folders, or rename the first one if there is no second."""
    with nobody_renames(final), naming or nullcontext():
        _settle(final)
        _, old = places(final)
        if not os.path.lexists(final):
            part.rename(final)
        elif not _exchange(part, final):
            final.rename(old)
            try:
                part.rename(final)
            except OSError:
                _settle(final)
                raise
            old.rename(part)


def _exchange(path: Path, other: Path) -> bool:
    """Exchange two names in one step. Return False if the system or the file system can't, or it fails."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    failed: int = renameat2(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return not failed


def _discard(part: Path) -> None:
    """Remove it. An interruption may have left who would give it the final name still at that, or about to be."""
    with _naming:
        if not os.path.lexists(part):
            return
        name, _, host = part.name.rpartition("@")  # the folder's own name may have an @, too
        doomed = part.with_name(f"{name}x@{host}")
        part.rename(doomed)
    _remove(doomed)


def _settle(final: Path) -> None:
    """A replacement may have been cut short between its two steps: what it was to replace has its name again."""
    _, old = places(final)
    if os.path.lexists(old):
        if os.path.lexists(final):
            _remove(old.rename(_part(final)))
        else:
            old.rename(final)


def _part(final: Path) -> Path:
    """Return a new name for a folder that isn't complete."""
    return final.with_name(f"{_PART}{final.name}-{os.getpid()}-{next(_numbers)}@{socket.gethostname()}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class GrowingFile:
    """A file to which text is added: all of a piece, or, where the disk is full, nothing of it."""

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        self.path = path
        self._file = FileIO(path, "w" if anew else "a")

    def add(self, text: str) -> None:
        """Add a piece; who reads the file sees it from now on.

        Raises:
            OSError: The disk is full, or the like; its `filename` says which file it is about.
        """
        end = self._file.seek(0, 2) if self._file.seekable() else None  # of a pipe nothing can be taken back
        left = memoryview(text.encode())
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            if end is not None:
                with contextlib.suppress(OSError):
                    self._file.truncate(end)
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        """Add nothing any more."""
        self._file.close()

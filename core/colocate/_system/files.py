"""Write files and folders atomically, and append complete pieces to files."""

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

_OLD, _PART = ".old-", ".part-"  # Replaced and unfinished folders have these prefixes.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux defines these constants for `renameat2`.
_MOST_JSON = 2**26  # A JSON file may have at most this many bytes.
_numbers = itertools.count(1)
_naming = threading.Lock()


@contextlib.contextmanager
def atomic_folder(final: Path, naming: AbstractContextManager[object] | None = None) -> Iterator[Path]:
    """Yield a temporary folder that gets the final name if the block succeeds, and is removed otherwise.

    Several threads, processes or signal handlers may write folders of one name at once; the last one to succeed stays.
    An existing folder is replaced atomically. Some file systems (NFS) can't do that, so that readers there must look in
    both paths of `get_places`.

    Args:
        final: The final name. An existing folder is replaced as a whole.
        naming: Entered while the folder is renamed; an exception prevents the renaming.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    tidy_folder(final.parent, re.escape(final.name))
    part = _create_part_path(final)
    part.mkdir()
    try:
        yield part
        for path in [*part.rglob("*"), part]:  # Flush to disk before the final name marks the folder as complete.
            _sync(path)
        _give_name(part, final, naming)
    finally:
        _discard(part)  # This removes the unfinished folder after an error, or the old folder after an exchange.
    _sync(final.parent)


def get_places(final: Path) -> tuple[Path, Path]:
    """Return the two possible paths of a complete folder: the final path, and the path used during a replacement.

    A killed replacement leaves the folder on the second path. A reader may race with a replacement, and must look
    twice.
    """
    return final, final.with_name(f"{_OLD}{final.name}")


def list_complete_folders(parent: Path) -> dict[str, Path]:
    """Return the complete folders in a parent folder, as a mapping from name to path (see `get_places`)."""
    if not parent.is_dir():
        return {}
    with lock_names(parent / _OLD):
        names = os.listdir(parent)
    old_folders = {name.removeprefix(_OLD): parent / name for name in names if name.startswith(_OLD)}
    return old_folders | {name: parent / name for name in names if not name.startswith((_OLD, _PART))}


def remove_folder(final: Path) -> None:
    """Remove a complete folder. A killed process leaves no partial folder under this name."""
    doomed = final.rename(_create_part_path(final))
    _remove(doomed)


def tidy_folder(parent: Path, name: str = ".*", *, is_alone: bool = False) -> None:
    """Finish the replacements of killed writers in a folder, and remove unfinished folders.

    Args:
        parent: The folder.
        name: A regular expression for the names to tidy.
        is_alone: Whether no process of another machine writes here. Unfinished folders of other machines are then
            removed, too.
    """
    import psutil  # Imported late, so that a failed import from disk fails only this call.

    replaced = re.compile(f"{re.escape(_OLD)}(?P<name>{name})")
    written = re.compile(rf"{re.escape(_PART)}{name}-(?P<pid>\d+)-\d+x?(?:@(?P<host>.*))?")
    with lock_names(parent / _OLD):
        for path in list(parent.iterdir()):
            if match := replaced.fullmatch(path.name):
                _finish_replacement(path.with_name(match["name"]))
            elif match := written.fullmatch(path.name):
                is_here = match["host"] in (None, socket.gethostname())
                if not psutil.pid_exists(int(match["pid"])) if is_here else is_alone:
                    _remove(path)


@contextlib.contextmanager
def lock_names(final: Path) -> Iterator[None]:
    """Lock the parent folder, so that no other thread or process of this machine renames folders there.

    The lock doesn't reach across machines, or file systems without locks.
    """
    with _naming, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # The file system may lack locks, or the parent folder may not exist.
            descriptor = os.open(final.parent, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Unlock explicitly, because a forked child may keep the descriptor open.
            stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        yield


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, so that readers never see a part of the text."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # A user's text may have lone surrogates.
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read.

    Raises:
        OSError: The file can't be read.
        ValueError: The path is a pipe or a device, which may never end.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - the caller's
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError("it is no file, but a pipe or a device")


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: The file can't be read.
        ValueError: The content isn't JSON or is too large, or the path is no regular file; see `open_file`.
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


def _give_name(part: Path, final: Path, naming: AbstractContextManager[object] | None) -> None:
    """Rename the unfinished folder to the final name; exchange the folders if another folder has this name."""
    with lock_names(final), naming or nullcontext():
        _finish_replacement(final)
        _, old = get_places(final)
        if not os.path.lexists(final):
            part.rename(final)
        elif not _exchange(part, final):
            final.rename(old)
            try:
                part.rename(final)
            except OSError:
                _finish_replacement(final)
                raise
            old.rename(part)


def _exchange(path: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False on any failure, such as a lack of system support."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    failed: int = renameat2(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return not failed


def _discard(part: Path) -> None:
    """Rename an unfinished folder, so that no other thread can publish the folder, and remove it."""
    with _naming:
        if not os.path.lexists(part):
            return
        name, _, host = part.name.rpartition("@")  # The folder's own name may contain an @, too.
        doomed = part.with_name(f"{name}x@{host}")
        part.rename(doomed)
    _remove(doomed)


def _finish_replacement(final: Path) -> None:
    """Repair a replacement that was interrupted between two renames: restore the old folder if there is no new one."""
    _, old = get_places(final)
    if os.path.lexists(old):
        if os.path.lexists(final):
            _remove(old.rename(_create_part_path(final)))
        else:
            old.rename(final)


def _create_part_path(final: Path) -> Path:
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
    """A file that grows by appended pieces. If a piece can't be written completely, its beginning is removed again."""

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        self.path = path
        self._file = FileIO(path, "w" if anew else "a")

    def append_text(self, text: str) -> None:
        """Append a text, which readers can see at once.

        Raises:
            OSError: The disk is full, for example; `filename` is the path.
        """
        end = self._file.seek(0, 2) if self._file.seekable() else None  # A pipe can't be truncated.
        remaining = memoryview(text.encode())
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            if end is not None:
                with contextlib.suppress(OSError):
                    self._file.truncate(end)
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        self._file.close()

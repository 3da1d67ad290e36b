"""Folders and files that are complete, or not there; and files that grow by whole pieces."""

from __future__ import annotations

import contextlib
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
from io import FileIO
from pathlib import Path
from typing import Any

import psutil

from colocate._signals.deferred import run_deferred

_MOST_JSON = 2**26  # bytes of a file
_numbers = itertools.count(1)
_naming = threading.Lock()  # never taken on the main thread


@contextlib.contextmanager
def atomic_folder(final: Path, naming: AbstractContextManager[object] | None = None) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends well, and is removed otherwise.

    Several threads, processes, or handlers of signals, may write folders of one name at once: the last one to end well
    stays. Who reads meanwhile finds what is complete in one of `places`.

    Args:
        final: The name. What is there already is replaced as a whole.
        naming: Is entered while the folder gets its name; when that raises, it gets none.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    run_deferred(lambda: _tidy(final))
    part = _beside(".part-", final, f"-{os.getpid()}-{next(_numbers)}@{socket.gethostname()}")
    part.mkdir()
    try:
        yield part
        for path in [*part.rglob("*"), part]:  # on the disk before the name says that it is complete
            _sync(path)
        run_deferred(lambda: _name(part, final, naming))
    finally:
        run_deferred(lambda: _discard(part))  # half a folder, or what was replaced
    _sync(final.parent)


def places(final: Path) -> tuple[Path, Path]:
    """Return where the complete folder of a name may be: under its name, or beside it while another one replaces it.

    A replacement that was cut short leaves it beside. Who looks may be overtaken, and looks twice.
    """
    return final, _beside(".old-", final)


@contextlib.contextmanager
def nobody_renames(final: Path) -> Iterator[None]:
    """A block in which nobody else gives a name in this folder's parent: no thread, and no process of this machine.

    It is never entered on the main thread. Across machines nothing is locked, nor where a file system knows no locks.
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


def json_of(path: Path) -> Any:
    """Return what a file of JSON says.

    Raises:
        OSError: It can't be read.
        ValueError: It isn't JSON, or too much of that, or no file but a pipe or a device, which may never end.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no file, but a pipe or a device")
        if found.st_size > _MOST_JSON:
            raise ValueError(f"{found.st_size:,} bytes; at most {_MOST_JSON:,}")
        text = file.read(_MOST_JSON)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too many lists and mappings inside each other") from None


def _name(part: Path, final: Path, naming: AbstractContextManager[object] | None) -> None:
    """Have the two change places, as far as there is anything at the second."""
    with nobody_renames(final), naming or nullcontext():
        _settle(final)
        _, old = places(final)
        if not os.path.lexists(final):
            part.rename(final)
            return
        final.rename(old)
        try:
            part.rename(final)
        except OSError:
            _settle(final)
            raise
        old.rename(part)


def _discard(part: Path) -> None:
    """Remove it. An interruption may have left who would give it the final name still at that, or about to be."""
    with _naming:
        if not os.path.lexists(part):
            return
        doomed = part.with_name(part.name.replace("@", "x@"))
        part.rename(doomed)
    _remove(doomed)


def _tidy(final: Path) -> None:
    """See to what writers of this name have left that were killed."""
    with nobody_renames(final):
        _settle(final)
        written = re.compile(re.escape(_beside(".part-", final, "-").name) + r"(\d+)-\d+x?(?:@(.*))?")
        for path in list(final.parent.iterdir()):
            left = written.fullmatch(path.name)
            # Whether those of other machines run isn't known here: theirs stay.
            if left and left[2] in (None, socket.gethostname()) and not psutil.pid_exists(int(left[1])):
                _remove(path)


def _settle(final: Path) -> None:
    """A replacement may have been cut short between its two steps: what it was to replace has its name again."""
    _, old = places(final)
    if os.path.lexists(old):
        if os.path.lexists(final):
            _remove(old)
        else:
            old.rename(final)


def _beside(prefix: str, final: Path, suffix: str = "") -> Path:
    return final.parent / f"{prefix}{final.name}{suffix}"


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

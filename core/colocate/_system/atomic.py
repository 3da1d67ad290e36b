"""Folders and files that are complete, or not there."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil

from colocate._system.off_main import off_main

_numbers = itertools.count(1)
_naming = threading.Lock()  # never taken on the main thread


@contextlib.contextmanager
def atomic_folder(final: Path, naming: AbstractContextManager[object] | None = None) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends well, and is removed otherwise.

    Several threads, or handlers of signals, may write folders of one name at once: the last one to end well stays.

    Args:
        final: The name. What is there already is replaced as a whole.
        naming: Is entered while the folder gets its name; when that raises, it gets none.
    """
    settle(final)
    for left in _parts_of_the_dead(final):
        _remove(left)
    part = _beside(".part-", final, f"-{os.getpid()}-{next(_numbers)}")
    part.mkdir(parents=True)
    try:
        yield part
        for path in [*part.rglob("*"), part]:  # on the disk before the name says that it is complete
            _sync(path)
        with naming or nullcontext():
            off_main(lambda: _put(part, final))
    finally:
        off_main(lambda: _discard(part))  # half a folder, or what was replaced
    _sync(final.parent)


def write_whole(path: Path, text: str) -> None:
    """Write a file, all of it or nothing."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # a user's text may have lone surrogates
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _put(part: Path, final: Path) -> None:
    """Have the two change places, as far as there is anything at the second."""
    with _naming:
        _settle(final)
        old = _beside(".old-", final)
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
        doomed = part.with_name(f"{part.name}x")
        part.rename(doomed)
    _remove(doomed)


def settle(final: Path) -> None:
    """A replacement may have been cut short between its two steps: what it was to replace has its name again."""

    def settled() -> None:
        with _naming:
            _settle(final)

    off_main(settled)


def _settle(final: Path) -> None:
    old = _beside(".old-", final)
    if os.path.lexists(old):
        if os.path.lexists(final):
            _remove(old)
        else:
            old.rename(final)


def _parts_of_the_dead(final: Path) -> Iterator[Path]:
    """What writers have left that were killed. Those of other machines are taken for them."""
    for left in final.parent.glob(glob.escape(_beside(".part-", final, "-").name) + "*"):
        pid = left.name.split("-")[-2]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            yield left


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

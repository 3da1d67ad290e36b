"""Folders that are complete, or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path


@contextlib.contextmanager
def atomic_folder(final: Path, naming: AbstractContextManager[object] | None = None) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends well, and is removed otherwise.

    Args:
        final: The name. What is there already is replaced as a whole.
        naming: Is entered while the folder gets its name; when that raises, it gets none.
    """
    settle(final)
    part, old = _beside(".part-", final), _beside(".old-", final)
    _remove(part)
    part.mkdir(parents=True)
    try:
        yield part
        for path in [*part.rglob("*"), part]:  # on the disk before the name says that it is complete
            _sync(path)
        with naming or nullcontext():
            if os.path.lexists(final):
                final.rename(old)
            part.rename(final)
    except BaseException:
        settle(final)
        _remove(part)
        raise
    _sync(final.parent)
    _remove(old)


def settle(final: Path) -> None:
    """A replacement may have been cut short between its two steps: what it was to replace has its name again."""
    old = _beside(".old-", final)
    if os.path.lexists(old):
        if os.path.lexists(final):
            _remove(old)
        else:
            old.rename(final)


def _beside(prefix: str, final: Path) -> Path:
    return final.parent / f"{prefix}{final.name}"


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

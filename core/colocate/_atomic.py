"""Folders that are complete, or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends well, and is removed otherwise.

    Args:
        final: The name. What is there already is replaced as a whole.
    """
    parent = final.parent
    part, old = (parent / f"{prefix}{final.name}" for prefix in (".part-", ".old-"))
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for path in [*part.rglob("*"), part]:  # on the disk before the name says that it is complete
        _sync(path)
    if final.exists():
        final.rename(old)
    part.rename(final)
    _sync(parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

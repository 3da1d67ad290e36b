"""The files of a checkpoint, by name: their sizes, and a digest of each, by which one that was damaged is refused."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from colocate.errors import ColocateError

Look: TypeAlias = "tuple[list[str], dict[str, str]]"
"""Which files of a checkpoint a worker is writing yet, and digests of those that it has looked at."""

_TOLD = 8  # files that an error names


def sizes_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the files of a folder, with size and time of the last change in nanoseconds."""
    found = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in sorted(names)):
            with suppress(FileNotFoundError):  # it is gone meanwhile, or is a link to nothing
                if path.is_file():
                    told = path.stat()
                    found[path.relative_to(folder).as_posix()] = told.st_size, told.st_mtime_ns
    return found


def digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of files: SHA-256.

    Raises:
        OSError: One can't be read.
    """
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def being_written(folder: Path) -> list[str]:
    """Return the files of a folder that this process, or one it has started, has open to write to them."""
    import psutil  # an import from disk, unlike our own modules: on failure only this call fails

    found, inside = [], f"{folder.resolve()}{os.sep}"
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            found += [
                file.path.removeprefix(inside)
                for file in process.open_files()
                if file.path.startswith(inside) and file.mode != "r"
            ]
    return found


def changed_sizes(folder: Path, files: Mapping[str, Sequence[object]]) -> list[str]:
    """Return, in words, which files of a checkpoint are missing or of another size than its record says."""
    found = []
    for name, (size, _) in files.items():
        try:
            now = (folder / name).stat().st_size
        except OSError as error:
            found.append(f"{name} isn't there ({error.strerror})")
        else:
            found += [f"{name} has {now} bytes, and had {size}"] * (now != size)
    return found


def refuse_changed(folder: Path, files: Mapping[str, Sequence[object]], cause: BaseException | None = None) -> None:
    """Refuse a checkpoint with files that aren't what its record says.

    Raises:
        ColocateError: It has such files, all of which are named.
    """
    if wrong := _changed(folder, files):
        raise ColocateError(refusal(folder, wrong)) from cause


def refusal(folder: Path, wrong: Sequence[str]) -> str:
    """Return why nobody goes on from a checkpoint, given what is wrong with its files."""
    return (
        f"the checkpoint in {folder} isn't what was saved there: {'; '.join(wrong[:_TOLD])}"
        f"{f'; and {len(wrong) - _TOLD} more' * (len(wrong) > _TOLD)}. It was damaged or changed since: go on from "
        "another one"
    )


def _changed(folder: Path, files: Mapping[str, Sequence[object]]) -> list[str]:
    """Return, in words, which files of a checkpoint aren't what its record says; all of them are read."""
    if found := changed_sizes(folder, files):
        return found
    now = digests_of(folder, files)
    return [f"{name} has other contents than it had" for name, (_, digest) in files.items() if now[name] != digest]

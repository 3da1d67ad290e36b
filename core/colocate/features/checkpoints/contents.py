"""Sizes and digests of a checkpoint's files, by which a damaged file is found."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from colocate.errors import ColocateError

_MOST_NAMED = 8  # An error names at most this many files.


def read_sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size in bytes and the modification time in nanoseconds of each file in a folder, by relative path."""
    sizes = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in sorted(names)):
            with suppress(FileNotFoundError):  # The file may have been removed, or be a broken link.
                if path.is_file():
                    status = path.stat()
                    sizes[path.relative_to(folder).as_posix()] = status.st_size, status.st_mtime_ns
    return sizes


def compute_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 digests of files in a folder, by name.

    Raises:
        OSError: A file can't be read.
    """
    digests = {}
    for name in names:
        with (folder / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def find_open_files(folder: Path) -> list[str]:
    """Return the files of a folder that this process or a descendant process has open for writing."""
    import psutil  # Imported here, so that only this call fails if psutil can't be imported.

    open_files, inside = [], f"{folder.resolve()}{os.sep}"
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # The process may have ended.
            open_files += [
                file.path.removeprefix(inside)
                for file in process.open_files()
                if file.path.startswith(inside) and file.mode != "r"
            ]
    return open_files


def find_changed_sizes(folder: Path, files: Mapping[str, Sequence[object]]) -> list[str]:
    """Return a description of each file that is missing or differs in size from the checkpoint's record."""
    changes = []
    for name, (size, _) in files.items():
        try:
            now = (folder / name).stat().st_size
        except OSError as error:
            changes.append(f"{name} isn't there ({error.strerror})")
        else:
            changes += [f"{name} has {now} bytes, and had {size}"] * (now != size)
    return changes


def check_unchanged(folder: Path, files: Mapping[str, Sequence[object]], cause: BaseException | None = None) -> None:
    """Raise an error if files of a checkpoint differ from the checkpoint's record.

    Raises:
        ColocateError: Files are missing or changed; the text names them.
    """
    if wrong := _find_changed(folder, files):
        raise ColocateError(explain_refusal(folder, wrong)) from cause


def explain_refusal(folder: Path, wrong: Sequence[str]) -> str:
    """Return the error text for a damaged checkpoint, given a description of each damaged file."""
    return (
        f"the checkpoint in {folder} isn't what was saved there: {'; '.join(wrong[:_MOST_NAMED])}"
        f"{f'; and {len(wrong) - _MOST_NAMED} more' * (len(wrong) > _MOST_NAMED)}. It was damaged or changed "
        "since: go on from "
        "another one"
    )


def _find_changed(folder: Path, files: Mapping[str, Sequence[object]]) -> list[str]:
    if changes := find_changed_sizes(folder, files):
        return changes
    now = compute_digests(folder, files)
    return [f"{name} has other contents than it had" for name, (_, digest) in files.items() if now[name] != digest]

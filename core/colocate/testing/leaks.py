"""What a piece of code leaves behind in this process and below it: processes, threads, descriptors, memory, files."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from colocate.testing.waiting import becomes_true

_PATIENCE_S = 10.0
_watches: list[Watch] = []


class Watch:
    """What there was at one moment; `check` fails if there is more later."""

    def __init__(self) -> None:
        self._before = _everything()
        _watches.append(self)

    def adopt(self, more: dict[str, str]) -> None:
        """Take what has been made since for a part of what there was."""
        self._before.update(more)

    def leaked(self) -> list[str]:
        """What there is more now, in words."""
        return [words for key, words in _everything().items() if key not in self._before]

    def check(self) -> None:
        """Fail if something is left, after what is on its way out has had time to go.

        Raises:
            AssertionError: Says what is left.
        """
        _watches.remove(self)
        if not self.leaked():
            return
        gc.collect()
        becomes_true(lambda: not self.leaked(), _PATIENCE_S)
        left = self.leaked()
        assert not left, "left behind:\n" + "\n".join(f"  {words}" for words in left)


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """What is made inside is shared by several tests: whoever made it closes it, later."""
    before = _everything()
    try:
        yield
    finally:
        made = {key: words for key, words in _everything().items() if key not in before}
        for watch in _watches:
            watch.adopt(made)


@contextlib.contextmanager
def own_temporary_folder(folder: Path) -> Iterator[str]:
    """Have this process and its children make their temporary files in a folder of ours."""
    old, old_env = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield str(folder)
    finally:
        tempfile.tempdir = old
        del os.environ["TMPDIR"]
        if old_env is not None:
            os.environ["TMPDIR"] = old_env


def _everything() -> dict[str, str]:
    return {**_processes(), **_threads(), **_descriptors(), **_memory(), **_files()}


def _processes() -> dict[str, str]:
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            key = f"process {process.pid} {process.create_time()}"
            what = "a zombie" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())[:200]
        except psutil.NoSuchProcess:
            continue
        found[key] = f"process {process.pid}: {what}"
    return found


def _threads() -> dict[str, str]:
    return {f"thread {id(thread)} {thread.name}": f"thread {thread.name!r}" for thread in threading.enumerate()}


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # that of the listing itself
            continue
        found[f"descriptor {name} {target}"] = f"file descriptor {name}: {target}"
    return found


def _memory() -> dict[str, str]:
    """Memory shared with other processes: mapped here, or named after this process."""
    found = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/memfd:" in line or "/dev/shm/" in line:
                address, *_, path = line.split(maxsplit=5)
                found[f"mapping {address.partition('-')[0]} {path}"] = f"shared memory at {address}: {path.strip()}"
    shm = Path("/dev/shm")
    if shm.is_dir():
        for entry in shm.iterdir():
            if "colocate" in entry.name or f"_{os.getpid()}_" in entry.name:
                found[f"shm {entry}"] = f"shared memory {entry}"
    return found


def _files() -> dict[str, str]:
    folder = Path(tempfile.gettempdir())
    return {f"file {entry}": f"temporary file {entry}" for entry in folder.iterdir() if _ours(entry)}


def _ours(entry: Path) -> bool:
    if entry.name.startswith("torchinductor_"):  # torch's own cache
        return False
    # In a folder of our own everything is ours (see own_temporary_folder), elsewhere what has our name.
    return tempfile.tempdir == os.environ.get("TMPDIR") or "colocate" in entry.name

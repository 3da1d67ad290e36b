"""Lock a run's folder for one driver, with a kernel lock, and with a heartbeat for file systems of several machines."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import psutil

from colocate.driver import Thread
from colocate.errors import ClosedError, ConfigError

LOCK = "lock.json"
"""Name of the lock file in the folder."""

BEAT_S = 5.0
"""Seconds between heartbeats."""

WATCHED_S = 3 * BEAT_S
"""Seconds without a heartbeat after which a driver on another machine counts as dead."""

NAMED_WITHIN_S = 1.0
"""Seconds within which a lock's new owner writes its entry."""

_log = logging.getLogger("colocate")

_files: set[int] = set()
"""File descriptors that hold a lock, or soon will. A forked child closes its copies, which would keep the lock."""


def _close_in_child() -> None:
    while _files:
        os.close(_files.pop())


os.register_at_fork(after_in_child=_close_in_child)


@attrs.define(eq=False)
class FolderLock:
    """A driver's lock of a run's folder. `lock.json` has the driver's identity and a heartbeat."""

    _path: Path
    _file: int
    _owner: dict[str, Any]
    _process: int = attrs.field(factory=os.getpid, init=False)
    _released: threading.Event = attrs.field(factory=threading.Event, init=False)
    _beat_lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)  # Held by heartbeats and by `release`.

    @classmethod
    def acquire(cls, folder: Path, say: Callable[[str], None] = lambda text: None) -> FolderLock:
        """Acquire the lock of a run's folder.

        Args:
            folder: The run's folder.
            say: Called with the reason if the lock isn't acquired at once.

        Raises:
            ConfigError: Another driver writes into the folder; the message names machine, process and job.
        """
        path = folder / LOCK
        while True:
            _wait_for_silence(folder, path, say)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _files.add(file)
            try:
                # Don't use lockf, because such a lock ends as soon as any code in this process closes the file.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                _close(file)
                raise _refusal(folder, _await_owner(path)) from None
            except OSError:  # The file system has no locks, so rely on the heartbeat.
                pass
            if _is_same_file(path, file):
                break
            _close(file)  # The previous owner has just removed the file.
        owner = {
            "host": platform.node(),
            "boot": _boot_id(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
        }
        if (job := os.environ.get("SLURM_JOB_ID")) is not None:
            owner["job"] = job
        lock = cls(path, file, owner)
        os.ftruncate(file, 0)
        lock._write_beat(0)
        Thread(target=lock._keep_beating, name="colocate-lock").start()
        return lock

    def check_owned(self) -> None:
        """Raise an error if another driver has taken the folder after this driver's heartbeats failed for too long.

        Raises:
            ClosedError: Another driver has taken the folder.
        """
        with contextlib.suppress(OSError):
            stored = _parse_owner(os.pread(self._file, 4096, 0))
            if _is_same_file(self._path, self._file) and {**stored, "beat": 0} == {**self._owner, "beat": 0}:
                return
        by = _describe_owner(_read_owner(self._path))
        raise ClosedError(f"{self._path.parent} isn't this driver's any more: {by} has taken it", closed_by=by)

    def release(self) -> None:
        """Release the lock. Does nothing in a forked child."""
        if self._process != os.getpid():
            return
        self._released.set()
        with self._beat_lock:
            with contextlib.suppress(OSError):
                if _is_same_file(self._path, self._file):
                    self._path.unlink()
            _close(self._file)

    def _keep_beating(self) -> None:
        beat, failed = 0, False
        while not self._released.wait(BEAT_S):
            beat += 1
            try:
                with self._beat_lock:
                    if not self._released.is_set():
                        self.check_owned()
                        self._write_beat(beat)
            except (OSError, ClosedError) as error:
                if not failed:
                    _log.warning("the lock of a run's folder: %s", error)
                failed = True

    def _write_beat(self, number: int) -> None:
        # All entries have the same length, so that a concurrent reader finds the old or the new entry.
        os.pwrite(self._file, json.dumps({**self._owner, "beat": f"{number:012d}"}).encode(), 0)


@contextlib.contextmanager
def lock_folder(folder: Path, say: Callable[[str], None]) -> Iterator[FolderLock]:
    """A context manager that holds the lock of a run's folder; see `FolderLock.acquire`."""
    lock = FolderLock.acquire(folder, say)
    try:
        yield lock
    finally:
        lock.release()


def _wait_for_silence(folder: Path, path: Path, say: Callable[[str], None]) -> None:
    """Wait until no driver on another machine can be writing, because kernel locks may not work across machines."""
    owner = _read_owner(path)
    if not owner:
        return
    if owner.get("boot") == _boot_id():
        if _is_alive(owner):  # Without file locks, only this check finds a live owner.
            raise _refusal(folder, owner)
        return
    say(f"{_describe_owner(owner)} has had {folder}: looking for {WATCHED_S:g} s whether it goes on")
    until = time.monotonic() + WATCHED_S
    while time.monotonic() < until:
        time.sleep(BEAT_S / 20)
        now = _read_owner(path)
        if not now:
            return
        if now != owner:
            raise _refusal(folder, now)


def _close(file: int) -> None:
    _files.discard(file)
    os.close(file)


def _await_owner(path: Path) -> dict[str, Any]:
    """Return the entry of a lock's owner; wait up to `NAMED_WITHIN_S` seconds for a new owner's entry."""
    until = time.monotonic() + NAMED_WITHIN_S
    while not (owner := _read_owner(path)) and time.monotonic() < until:
        time.sleep(NAMED_WITHIN_S / 100)
    return owner


def _is_alive(owner: dict[str, Any]) -> bool:
    with contextlib.suppress(psutil.Error, KeyError, TypeError):
        return bool(psutil.Process(owner["pid"]).create_time() == owner["started"])
    return False


def _refusal(folder: Path, owner: dict[str, Any]) -> ConfigError:
    return ConfigError(
        f"{folder} is being written by {_describe_owner(owner)}; wait for its end, or give this run a name of its own "
        "(in an array of jobs, name: demo-${SLURM_ARRAY_TASK_ID})"
    )


def _describe_owner(owner: dict[str, Any]) -> str:
    if not owner:
        return "another driver"
    job = f" (job {owner['job']})" if "job" in owner else ""
    return f"the driver with pid {owner.get('pid')} on {owner.get('host')}{job}"


def _read_owner(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return _parse_owner(path.read_bytes())
    return {}


def _parse_owner(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(text)
        return data if isinstance(data, dict) else {}
    return {}


def _is_same_file(path: Path, file: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file))
    return False


def _boot_id() -> str:
    """Return the kernel's boot id, because kernel locks are valid only within one boot of one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

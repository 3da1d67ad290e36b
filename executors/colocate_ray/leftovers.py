"""The search for leftovers of lost Ray drivers on this machine. Doesn't import or join Ray."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import psutil

from colocate.executor import Running
from colocate.keeper import arguments_of
from colocate_ray.envoy import MARK
from colocate_ray.private import PREFIX

SERVICE = "colocate_ray.service"
# A janitor isn't a leftover. A janitor works after the other processes have ended, and ends without help.
_JANITOR = "janitor.py"
_FOLDER = re.compile(rf"(/\S*/{PREFIX}[^/\s]+)")


@attrs.frozen
class _Seen:
    process: psutil.Process
    envoy_of: list[str] | None
    folder: str | None
    marked: bool
    janitor: bool


def left_here() -> list[Running]:
    """List envoys without drivers, processes of private Rays without envoys, and unused folders."""
    processes = list(_look())
    envoys = {entry.process.pid for entry in processes if entry.envoy_of is not None}
    rows: list[Running] = []
    for entry in processes:
        if entry.envoy_of is not None:
            rows += _envoy(entry.process, entry.envoy_of)
        elif not entry.janitor and (entry.marked or entry.folder):
            rows += _of_private(entry, envoys)
    return [*rows, *_folders({entry.folder for entry in processes if entry.folder})]


def _look() -> Iterator[_Seen]:
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            folder = _FOLDER.search(words)
            marked = MARK in _environment(process)
            yield _Seen(process, arguments_of(process, SERVICE), folder and folder[1], marked, _JANITOR in words)
        except (psutil.Error, OSError):  # The process has ended.
            continue


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.AccessDenied:  # The process belongs to another user.
        return {}


def _envoy(process: psutil.Process, told: list[str]) -> Iterator[Running]:
    driver = int(told[1]) if told[1:] and told[1].isdigit() else 0
    if driver and _outside(process, {driver}):
        yield from _running("Ray envoy", process, str(process.pid), f"it is in Ray on behalf of driver {driver}")


def _of_private(each: _Seen, envoys: set[int]) -> Iterator[Running]:
    if _outside(each.process, envoys):
        detail = f"a private Ray's, or started in it; its folder is {each.folder or 'not known'}"
        yield from _running("process of an envoy", each.process, str(each.process.pid), detail)


def _folders(in_use: set[str]) -> Iterator[Running]:
    """Yield folders of private Rays that are on no running process's command line.

    The janitor of a folder in use starts before the folder is made.
    """
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        for entry in sorted(Path(parent).glob(f"{PREFIX}*")):
            try:
                since = entry.stat().st_mtime
            except FileNotFoundError:
                continue
            if str(entry) not in in_use:
                yield Running("folder", str(entry), since=since, detail="the files of a private Ray, and its token")


def _running(kind: str, process: psutil.Process, name: str, detail: str) -> Iterator[Running]:
    try:
        yield Running(kind, name, pid=process.pid, since=process.create_time(), detail=f"{process.name()}: {detail}")
    except psutil.NoSuchProcess:
        return


def _outside(process: psutil.Process, pids: set[int]) -> bool:
    """Return whether a process is alive and isn't a descendant of any of `pids`."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        above = {parent.pid for parent in process.parents()}
    except psutil.Error:
        return False
    return bool(above) and not above & pids

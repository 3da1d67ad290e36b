"""The search for leftovers of lost Ray drivers on this machine. Doesn't import or join Ray."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import psutil

from colocate.executor import Running
from colocate.keeper import get_arguments
from colocate_ray.envoy import MARK
from colocate_ray.private import PREFIX

SERVICE = "colocate_ray.service"
# A janitor isn't a leftover. A janitor works after the other processes have ended, and ends without help.
_JANITOR = "janitor.py"
_FOLDER = re.compile(rf"(/\S*/{PREFIX}[^/\s]+)")


@attrs.frozen
class _ProcessInfo:
    process: psutil.Process
    envoy_of: list[str] | None
    folder: str | None
    marked: bool
    janitor: bool


def find_leftovers() -> list[Running]:
    """List envoys without drivers, processes of private Rays without envoys, and unused folders."""
    processes = list(_scan_processes())
    envoys = {entry.process.pid for entry in processes if entry.envoy_of is not None}
    rows: list[Running] = []
    for entry in processes:
        if entry.envoy_of is not None:
            rows += _envoy_rows(entry.process, entry.envoy_of)
        elif not entry.janitor and (entry.marked or entry.folder):
            rows += _private_rows(entry, envoys)
    return [*rows, *_find_folders({entry.folder for entry in processes if entry.folder})]


def _scan_processes() -> Iterator[_ProcessInfo]:
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            folder = _FOLDER.search(words)
            marked = MARK in _read_environment(process)
            yield _ProcessInfo(
                process, get_arguments(process, SERVICE), folder and folder[1], marked, _JANITOR in words
            )
        except (psutil.Error, OSError):  # The process has ended.
            continue


def _read_environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.AccessDenied:  # The process belongs to another user.
        return {}


def _envoy_rows(process: psutil.Process, told: list[str]) -> Iterator[Running]:
    driver = int(told[1]) if told[1:] and told[1].isdigit() else 0
    if driver and _is_outside(process, {driver}):
        yield from _to_running("Ray envoy", process, str(process.pid), f"it is in Ray on behalf of driver {driver}")


def _private_rows(each: _ProcessInfo, envoys: set[int]) -> Iterator[Running]:
    if _is_outside(each.process, envoys):
        detail = f"a private Ray's, or started in it; its folder is {each.folder or 'not known'}"
        yield from _to_running("process of an envoy", each.process, str(each.process.pid), detail)


def _find_folders(in_use: set[str]) -> Iterator[Running]:
    """Yield folders of private Rays that no running process names on its command line.

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


def _to_running(kind: str, process: psutil.Process, name: str, detail: str) -> Iterator[Running]:
    try:
        yield Running(kind, name, pid=process.pid, since=process.create_time(), detail=f"{process.name()}: {detail}")
    except psutil.NoSuchProcess:
        return


def _is_outside(process: psutil.Process, pids: set[int]) -> bool:
    """Return whether a process is alive and isn't a descendant of any of `pids`."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        above = {parent.pid for parent in process.parents()}
    except psutil.Error:
        return False
    return bool(above) and not above & pids

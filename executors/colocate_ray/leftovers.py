"""What drivers that are gone have left of Ray on this machine. Imports no Ray, and joins none."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from colocate._processes import arguments_of
from colocate.executor import Running

PREFIX = "colocate-ray-"  # of the folders of private Rays
SERVICE = "colocate_ray.service"
_JANITOR = "janitor.py"  # its work begins when the others are gone, and ends by itself
_FOLDER = re.compile(rf"(/\S*/{PREFIX}[^/\s]+)")
# A private Ray that is just starting has its folder, but no process yet on whose command line this stands.
_STARTS_WITHIN_S = 60.0


def left_here() -> list[Running]:
    """Envoys without their drivers, processes of private Rays without their envoys, folders of private Rays."""
    envoys: dict[int, psutil.Process] = {}
    in_use: dict[str, list[psutil.Process]] = {}
    found: list[Running] = []
    for process in psutil.process_iter():
        try:
            told, words = arguments_of(process, SERVICE), " ".join(process.cmdline())
        except (psutil.Error, OSError):  # gone, or somebody else's
            continue
        if told is not None:
            envoys[process.pid] = process
            found += _envoy(process, told)
        elif (folder := _FOLDER.search(words)) is not None:
            users = in_use.setdefault(folder[1], [])
            users += [] if _JANITOR in words else [process]
    for folder_name, processes in in_use.items():
        for process in processes:
            found += _of_private(process, folder_name, envoys)
    return [*found, *_folders(set(in_use))]


def _envoy(process: psutil.Process, told: list[str]) -> Iterator[Running]:
    driver = int(told[1]) if told[1:] and told[1].isdigit() else 0
    if driver and driver not in _ancestors(process):
        detail = f"it is in Ray on behalf of driver {driver}"
        yield from _running("Ray envoy", process, str(process.pid), detail)


def _of_private(process: psutil.Process, folder: str, envoys: dict[int, psutil.Process]) -> Iterator[Running]:
    ancestors = _ancestors(process)
    if ancestors and not ancestors & envoys.keys():
        yield from _running("process of a private Ray", process, folder, _name(process))


def _folders(in_use: set[str]) -> Iterator[Running]:
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        for entry in sorted(Path(parent).glob(f"{PREFIX}*")):
            try:
                since = entry.stat().st_mtime
            except FileNotFoundError:
                continue
            if str(entry) not in in_use and time.time() - since > _STARTS_WITHIN_S:
                yield Running("folder", str(entry), since=since, detail="the files of a private Ray, and its token")


def _running(kind: str, process: psutil.Process, name: str, detail: str) -> Iterator[Running]:
    try:
        yield Running(kind, name, pid=process.pid, since=process.create_time(), detail=detail)
    except psutil.NoSuchProcess:
        return


def _ancestors(process: psutil.Process) -> set[int]:
    """Empty when it is gone."""
    try:
        return {parent.pid for parent in process.parents()}
    except psutil.Error:
        return set()


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""

"""What there is in this process and below it now: live objects, processes, threads, descriptors, memory, files."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import psutil

from colocate._role import torch_groups
from colocate._system import shared_spill
from colocate._system.off_main import COURIER
from colocate.keeper import forks
from colocate.testing import origins
from colocate.worker.processes import MODULE, arguments_of
from colocate.worker.template import MODE

if TYPE_CHECKING:
    from colocate._crew.crew import Crew
    from colocate._owned.owned import Owned

_ENDS_WITHIN_S = 5.0
_CLOSES_WITHIN_S = 2.0
_OPEN = "was left open"
_OF_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_OF_DASK = "Dask-Offload"  # of a pool that a module of Dask has and never ends; with a GPU it is used from the start


@attrs.frozen(eq=False)
class Thing:
    """Something that a test may leave behind.

    Attributes:
        what: What it is.
        made: How its making is called: "started", "opened".
        line: Finds the line that made it; None where nobody knows.
        left: What is wrong with it.
        close: Does away with it; None where that isn't safe.
        group: The key of the group that it goes with.
        parent: The process that started it, where it is one.
        of_colocate: Whether colocate has made it for itself.
    """

    what: str
    made: str
    line: Callable[[], str | None]
    left: str
    close: Callable[[], object] | None = None
    group: str | None = None
    parent: int | None = None
    of_colocate: Callable[[], bool] = bool

    @property
    def words(self) -> str:
        """All of that."""
        line = self.line()
        return f"{self.what}, {self.made} at {line}, {self.left}" if line is not None else f"{self.what} {self.left}"


def everything() -> dict[str, Thing]:
    """All of it, by keys that are never those of something else later."""
    with origins.looking():
        return {
            **live_objects(),
            **_processes(),
            **_threads(),
            **_descriptors(),
            **_memory(),
            **_named_memory(),
            **_files(),
        }


def without_engines(left: dict[str, Thing], now: dict[str, Thing]) -> dict[str, Thing]:
    """What is left but for colocate's own things and for processes below such as were there before."""
    pids = {int(key.split()[1]): key for key in now if key.startswith("process ")}

    def is_of_engine(thing: Thing) -> bool:
        if thing.parent not in pids:
            return thing.of_colocate()
        above = pids[thing.parent]
        return above not in left or is_of_engine(left[above])

    return {key: thing for key, thing in left.items() if not is_of_engine(thing)}


# -- colocate's own


def live_objects() -> dict[str, Thing]:
    """Runtimes, pools and groups that are open, and the scopes and residents of groups; owners first."""
    connection = sys.modules.get("colocate._api.connection")
    found: dict[str, Thing] = {}
    for node in list(connection.live.values()) if connection is not None else ():
        found.update(_below(node))
    return found


def _below(node: Owned) -> Iterator[tuple[str, Thing]]:
    from colocate._crew.crew import Crew

    def close() -> None:
        node.close_for("the leak check of its test", _CLOSES_WITHIN_S, True)

    if node.alive:  # neither closed nor the parent's of a fork
        what = f"{node.kind} {node.name!r}"
        yield key_of(node), Thing(what, "made", lambda: origins.at(node.line), _OPEN, close)
    for child in list(node.children.values()):
        yield from _below(child)
    if isinstance(node, Crew) and node.alive:
        yield from _kept(node)


def key_of(node: Owned) -> str:
    """The key of a runtime, pool or group."""
    return f"{node.kind} {id(node)} {node.created}"


def _kept(group: Crew) -> Iterator[tuple[str, Thing]]:
    residents = group.residents
    for scope in list(residents.scopes):
        key = f"scope {id(scope)} {group.created}"
        yield (
            key,
            Thing(
                f"a scope of group {group.name!r}",
                "entered",
                lambda scope=scope: origins.at(scope.line),  # type: ignore[misc]
                _OPEN,
                lambda scope=scope: residents.leave(scope),  # type: ignore[misc]
                key_of(group),
            ),
        )
    for kept in list(residents.kept.values()):
        # One whose call has failed holds nothing; what is in a scope is told with that.
        if kept.freed_by is None and kept.call._error is None and not any(kept in s.kept for s in residents.scopes):
            yield (
                f"resident {kept.source.key} {group.created}",
                Thing(
                    f"the resident of {kept.source.label} in group {group.name!r}",
                    "kept",
                    lambda kept=kept: origins.at(kept.line),  # type: ignore[misc]
                    "was not freed",
                    lambda kept=kept: residents.release(kept, "the leak check of its test"),  # type: ignore[misc]
                    key_of(group),
                ),
            )


# -- of the process


def _processes() -> dict[str, Thing]:
    found = {}
    helper = _helper("_pid")
    for pid in _descendants(os.getpid()):
        if pid == helper:
            continue
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                key = f"process {pid} {process.create_time()}"
                zombie = process.status() == psutil.STATUS_ZOMBIE
                if not zombie and (arguments_of(process, MODULE) or [""])[0] == MODE:  # a template: ends by itself
                    continue
                what = "a zombie" if zombie else " ".join(process.cmdline())[:200]
                parent = process.ppid()
        except psutil.NoSuchProcess:
            continue
        found[key] = Thing(
            f"process {pid} ({what})",
            "started",
            lambda pid=pid: origins.of_process(pid),  # type: ignore[misc]
            "was never waited for" if zombie else "still runs",
            lambda process=process: _end(process),  # type: ignore[misc]
            parent=parent,
        )
    return found


def _descendants(pid: int) -> list[int]:
    """The processes below one. Where the kernel lists children, no others are looked at: each test asks twice."""
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    found: list[int] = []
    above = [pid]
    while above:
        children = _children(above.pop())
        found += children
        above += children
    return found


def _children(pid: int) -> list[int]:
    """Read until two readings agree: one may miss some while a sibling, or the thread that started them, ends."""
    before, now = None, _read_children(pid)
    while now != before:
        before, now = now, _read_children(pid)
    return now


def _read_children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended, or one of its threads
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as children:
                found += map(int, children.read().split())
    return found


def _helper(name: str) -> object:
    """What Python's own tracker of shared memory has; it starts with the first use, and ends with the process."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    return getattr(getattr(module, "_resource_tracker", None), name, None)


def _end(process: psutil.Process) -> None:
    popen = origins.popen_of(process.pid)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    if popen is not None:
        popen.wait(_ENDS_WITHIN_S)
    else:
        process.wait(_ENDS_WITHIN_S)  # takes a zombie away too


def _threads() -> dict[str, Thing]:
    # There is no way to end a thread from outside.
    return {
        f"thread {id(thread)} {thread.name}": Thing(
            f"thread {thread.name!r}",
            "started",
            lambda thread=thread: origins.of_thread(thread),  # type: ignore[misc]
            "still runs",
            of_colocate=lambda thread=thread: origins.is_of_colocate(thread),  # type: ignore[misc]
        )
        for thread in threading.enumerate()
        # They are the process's, and stay.
        if not thread.name.startswith((COURIER, _OF_DASK)) and not forks.own_thread(thread.name)
    }


def _descriptors() -> dict[str, Thing]:
    found = {}
    helper, lasting, spilled = _helper("_fd"), torch_groups.lasting_descriptors(), shared_spill.kept_open()
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # that of the listing itself
            continue
        if target.startswith(_OF_GPUS) or (number, target) in lasting or number in spilled:
            # Who has used them has them to the end, or as long as memory lies there that Python knows nothing of.
            continue
        if (
            number != helper and not forks.own_descriptor(number) and number > 2
        ):  # pytest's capture changes those of input and output
            found[f"descriptor {name} {target}"] = Thing(
                f"file descriptor {name} ({target})",
                "opened",
                lambda number=number, target=target: origins.of_descriptor(number, target),  # type: ignore[misc]
                "is still open",
                lambda number=number, target=target: _close_owners(number, target),  # type: ignore[misc]
                of_colocate=lambda number=number: origins.is_of_colocate(origins.socket_of(number)),  # type: ignore[misc]
            )
    return found


def _close_owners(number: int, target: str) -> None:
    """Close the objects that own a descriptor. One of which nobody knows where it comes from may be anybody's."""
    if (sock := origins.socket_of(number)) is not None:
        sock.close()
    if origins.of_descriptor(number, target) is None:
        return
    owners: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]
    for owner in owners:
        with contextlib.suppress(ValueError, OSError):  # it is closed, or has no descriptor
            if owner.fileno() == number:
                owner.close()


def _memory() -> dict[str, Thing]:
    """Memory that is mapped here, and shared with other processes. Whoever holds the mapping has to let go of it."""
    found = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/memfd:" in line or "/dev/shm/" in line:
                address, *_, path = line.split(maxsplit=5)
                path = path.strip()
                found[f"mapping {address.partition('-')[0]} {path}"] = Thing(
                    f"shared memory {path} at {address}",
                    "mapped",
                    lambda path=path: origins.mapped().get(path),  # type: ignore[misc]
                    "is still mapped",
                )
    return found


def _named_memory() -> dict[str, Thing]:
    found = {}
    mapped = origins.mapped()
    ours = f"_{os.getpid()}_"
    for name in os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else ():
        path = f"/dev/shm/{name}"
        if path in mapped or ours in name:
            found[f"shm {path}"] = Thing(
                f"shared memory {path}",
                "made",
                lambda path=path: mapped.get(path),  # type: ignore[misc]
                "was not unlinked",
                lambda path=path: Path(path).unlink(missing_ok=True),  # type: ignore[misc]
            )
    return found


def _files() -> dict[str, Thing]:
    # In a folder of our own everything is ours (see `leaks.own_temporary_folder`), elsewhere what has our name.
    own = tempfile.tempdir is not None and tempfile.tempdir == os.environ.get("TMPDIR")
    found = {}
    for entry in Path(tempfile.gettempdir()).iterdir():
        if entry.name.startswith("torchinductor_") or not (own or "colocate" in entry.name):  # torch's own cache
            continue
        found[f"file {entry}"] = Thing(
            f"temporary file {entry}",
            "made",
            lambda entry=entry: origins.of_path(str(entry)),  # type: ignore[misc]
            "is still there",
            (lambda entry=entry: _remove(entry)) if own else None,  # type: ignore[misc]
        )
    return found


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)

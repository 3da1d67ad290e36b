"""Finds the resources that a test leaves behind in this process and in its child processes."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import psutil

from colocate._owned.owned import Owned
from colocate._signals.deferred import COURIER
from colocate._system.lines import format_line
from colocate._worker_group.worker_group import WorkerGroup
from colocate.keeper import forks
from colocate.testing.waiting import becomes_true
from colocate.wire._forks import is_tracked
from colocate.worker.birth.processes import MODULE, get_arguments
from colocate.worker.birth.template import MODE

_PATIENCE_S = 10.0
_HELD_S = 1.0
_ENDS_WITHIN_S = 5.0
_CLOSES_WITHIN_S = 2.0
_LAST_WORDS = "What can be closed has been closed; the rest is not counted against the tests that follow."
_HEADING = "left behind: "
_INDENT = " " * len(_HEADING)
_OF_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
# These threads last as long as the process. "Dask-Offload" is a global thread pool of Dask.
_LASTING = (COURIER, forks.THREAD, "Dask-Offload", "tqdm_monitor")
_watches: list[LeakWatch] = []


@attrs.frozen(eq=False)
class Leak:
    """A resource that a test may leave behind.

    Attributes:
        text: A description of the resource and of the problem.
        close: Closes the resource; None if that isn't safe.
        group: The key of the group that closes the resource, too.
        parent: The pid of the parent, if the resource is a process.
        is_resident: Whether the garbage collector may free the resource.
        is_own: Whether colocate has created the resource for its own use.
    """

    text: str
    close: Callable[[], object] | None = None
    group: str | None = None
    parent: int | None = None
    is_resident: bool = False
    is_own: bool = False


class LeakWatch:
    """The resources that existed at one moment. `check_leaks` fails if there are more later.

    Attributes:
        shares_engines: Whether runtimes that outlive the watch may start threads and connections of colocate's own, and
            processes below those that existed before.
    """

    shares_engines = False

    def __init__(self) -> None:
        self._before = set(find_all())
        self._messages: list[str] = []
        _watches.append(self)

    def describe_leaks(self) -> list[str]:
        """Return a description of each resource that has been added since the watch began."""
        return [thing.text for thing in self._find_leaks().values()]

    def close_own(self, spared: Owned | None = None) -> None:
        """Record and close the runtimes, pools, groups and residents that are left, except for `spared`."""
        found = {key: thing for key, thing in find_objects().items() if key not in self._before}
        if spared is not None:
            found.pop(_node_key(spared), None)
        found = {key: thing for key, thing in found.items() if thing.group not in found}
        if any(thing.is_resident for thing in found.values()):  # A resident's handle may be in a reference cycle.
            gc.collect()

            # A thread that is about to drop an exception may hold a resident for a moment.
            def freed() -> bool:
                nonlocal found
                found = {key: thing for key, thing in find_objects().items() if key in found}
                return not any(thing.is_resident for thing in found.values())

            becomes_true(freed, _HELD_S)
        self._messages += [thing.text for thing in found.values()]
        for thing in found.values():  # Owners come first, and close the objects that they own.
            self._messages += _close_thing(thing)

    def check_leaks(self) -> None:
        """Fail if resources are left after a grace period, and close all that can be closed.

        Raises:
            AssertionError: Resources are left; the text lists them.
        """
        report: list[str] | None = None
        try:
            self.close_own()
            left = self._find_leaks()

            # Count only resources that every check finds, because some come and go, such as Dask's monitoring.
            def gone() -> bool:
                nonlocal left
                now = self._find_leaks()
                left = {key: thing for key, thing in left.items() if key in now}
                return not left

            if left:
                gc.collect()
                becomes_true(gone, _PATIENCE_S)
            report = [*self._messages, *(thing.text for thing in left.values())]
            for thing in left.values():
                report += _close_thing(thing)
        finally:
            self._end_watch(clean=report == [])
        if report:
            raise AssertionError(
                "\n".join([_HEADING + report[0], *(_INDENT + words for words in report[1:]), _LAST_WORDS])
            )

    def close_quietly(self) -> None:
        """Close the resources that are left, without a report, because the test has already failed."""
        try:
            self.close_own()
            for thing in self._find_leaks().values():
                _close_thing(thing)
        finally:
            self._end_watch()

    def ignore(self, more: Iterable[str]) -> None:
        """Treat more resources, given by key, as if they had existed at the start."""
        self._before.update(more)

    def _find_leaks(self) -> dict[str, Leak]:
        now = find_all()
        leaks = {key: thing for key, thing in now.items() if key not in self._before}
        if not self.shares_engines:
            return leaks
        pids = {int(key.split()[1]): key for key in now if key.startswith("process ")}

        def is_of_engine(thing: Leak) -> bool:
            if thing.parent not in pids:
                return thing.is_own
            above = pids[thing.parent]
            return above not in leaks or is_of_engine(leaks[above])

        return {key: thing for key, thing in leaks.items() if not is_of_engine(thing)}

    def _end_watch(self, clean: bool = False) -> None:
        _watches.remove(self)
        if _watches and not clean:  # Outer watches must not report these leaks again.
            leaks = self._find_leaks()
            for outer in _watches:
                outer.ignore(leaks)


def _close_thing(thing: Leak) -> list[str]:
    try:
        if thing.close is not None:
            thing.close()
    except BaseExceptionGroup as group:
        errors = group.exceptions
    except Exception as error:
        errors = (error,)
    else:
        errors = ()
    return [
        f"and then, closing it: {type(problem).__name__}: {str(problem).partition(chr(10))[0]}" for problem in errors
    ]


@contextlib.contextmanager
def share_between_tests() -> Iterator[None]:
    """A context manager: resources created in the block are shared by several tests, and don't count as leaks."""
    before = find_all()
    try:
        yield
    finally:
        new = [key for key in find_all() if key not in before]
        for watch in _watches:
            watch.ignore(new)


@contextlib.contextmanager
def use_temporary_folder(folder: Path) -> Iterator[str]:
    """A context manager that puts temporary files of this process and of its children into `folder`."""
    old, old_env = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield str(folder)
    finally:
        tempfile.tempdir = old
        del os.environ["TMPDIR"]
        if old_env is not None:
            os.environ["TMPDIR"] = old_env


# -- resources, by keys that are never used again for another resource


def find_all() -> dict[str, Leak]:
    """Return all resources that a test may leave behind, by key."""
    return {
        key: thing
        for things in (
            find_objects().items(),
            _find_processes(),
            _find_threads(),
            _find_descriptors(),
            _find_shared_memory(),
            _find_files(),
        )
        for key, thing in things
    }


def find_objects() -> dict[str, Leak]:
    """Return open runtimes, pools and groups, and the scopes and residents of groups, by key; owners come first."""
    connection = sys.modules.get("colocate._api.connection")
    nodes = list(connection.live_connections.values()) if connection is not None else []
    return {key: thing for node in nodes for key, thing in _walk_below(node)}


def _walk_below(node: Owned) -> Iterator[tuple[str, Leak]]:
    def close() -> None:
        node.close_for("the leak check of its test", _CLOSES_WITHIN_S, True)

    if node.alive:  # Skip nodes that are closed or that belong to the parent of a fork.
        yield (
            _node_key(node),
            Leak(f"{node.kind} {node.name!r}, made at {_format_line(node.line)}, was left open", close),
        )
    for child in list(node.children.values()):
        yield from _walk_below(child)
    if isinstance(node, WorkerGroup) and node.alive:
        yield from _find_residents(node)


def _node_key(node: Owned) -> str:
    return f"{node.kind} {id(node)} {node.created}"


def _format_line(line: tuple[str, int]) -> str:
    path, number = line
    return format_line((path.removeprefix(os.getcwd() + os.sep), number))


def _find_residents(group: WorkerGroup) -> Iterator[tuple[str, Leak]]:
    residents, of_group = group.residents, _node_key(group)
    for scope in list(residents.scopes):
        words = f"a scope of group {group.name!r}, entered at {_format_line(scope.line)}, was left open"
        leave = lambda scope=scope: residents.close_scope(scope)  # noqa: E731
        yield f"scope {id(scope)} {group.created}", Leak(words, leave, of_group)
    for kept in list(residents.records.values()):
        # A resident whose call has failed holds nothing, and a resident in a scope is reported with the scope.
        if kept.freed_by is None and kept.call._error is None and not any(kept in s.records for s in residents.scopes):
            label = f"the resident of {kept.source.label} in group {group.name!r}"
            words = f"{label}, kept at {_format_line(kept.call.line)}, was not freed"
            free = lambda kept=kept: residents.release(kept, "the leak check of its test")  # noqa: E731
            yield f"resident {kept.source.key} {group.created}", Leak(words, free, of_group, is_resident=True)


def _find_processes() -> Iterator[tuple[str, Leak]]:
    tracker = _read_tracker("_pid")
    for pid in sorted(_find_children(os.getpid())):
        with contextlib.suppress(psutil.NoSuchProcess), (process := psutil.Process(pid)).oneshot():
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            # A template isn't a leak, because it ends by itself.
            is_template = not is_zombie and (get_arguments(process, MODULE) or [""])[0] == MODE
            if process.pid != tracker and not is_template:
                command = "a zombie" if is_zombie else " ".join(process.cmdline())[:200]
                words = f"process {process.pid} ({command}) {'was never waited for' if is_zombie else 'still runs'}"
                end = lambda process=process: _end_process(process)  # noqa: E731
                yield f"process {process.pid} {process.create_time()}", Leak(words, end, parent=process.ppid())


def _find_children(pid: int) -> set[int]:
    """Return the pids of all processes below a process, from the kernel's lists if available, else by psutil."""
    try:
        # Read each list twice, because a list may lack a process if an older sibling ended during the read.
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children") for _ in range(2)]
    except OSError:  # The process, or one of its threads, has ended meanwhile.
        lists = []
    if not lists:
        with contextlib.suppress(psutil.NoSuchProcess):
            return {process.pid for process in psutil.Process(pid).children(recursive=True)}
        return set()
    children = {int(child) for line in lists for child in line.split()}
    return children.union(*map(_find_children, children))


def _read_tracker(name: str) -> object:
    """Return an attribute of Python's resource tracker, a process that runs until this process ends."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    return getattr(getattr(module, "_resource_tracker", None), name, None)


def _end_process(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    for obj in gc.get_objects():  # A `Popen` object of this process must notice the end.
        if issubclass(type(obj), subprocess.Popen) and obj.pid == process.pid:
            obj.wait(_ENDS_WITHIN_S)
    process.wait(_ENDS_WITHIN_S)  # This also removes a zombie.


def _find_threads() -> Iterator[tuple[str, Leak]]:
    for thread in threading.enumerate():
        if not thread.name.startswith(_LASTING):
            is_ours = thread.name.startswith("colocate-")
            yield f"thread {id(thread)} {thread.name}", Leak(f"thread {thread.name!r} still runs", is_own=is_ours)


def _find_descriptors() -> Iterator[tuple[str, Leak]]:
    # Skip descriptors of GPUs, which stay open, and the first three, which pytest's capture changes.
    known_descriptors = {0, 1, 2, _read_tracker("_fd")}
    groups: Any = sys.modules.get("colocate.features.process_groups.alone")  # None if process groups weren't used.
    lasting = () if groups is None else groups.lasting_descriptors()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # The descriptor that `listdir` used is closed.
            number, target = int(name), os.readlink(f"/proc/self/fd/{name}")
            is_of_process = (
                number in known_descriptors or (number, target) in lasting or forks.is_template_descriptor(number)
            )
            if not is_of_process and not target.startswith(_OF_GPUS):
                words = f"file descriptor {name} ({target}) is still open"
                yield f"descriptor {name} {target}", Leak(words, is_own=is_tracked(number))


def _find_shared_memory() -> Iterator[tuple[str, Leak]]:
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        if "/memfd:" in line or ("/dev/shm/" in line and "/dev/shm/sem." not in line):  # Semaphores stay mapped.
            address, *_, path = line.split(maxsplit=5)
            yield f"mapping {address.partition('-')[0]} {path}", Leak(f"shared memory {path} is still mapped")
    for entry in Path("/dev/shm").glob(f"*_{os.getpid()}_*"):
        unlink = lambda entry=entry: entry.unlink(missing_ok=True)  # noqa: E731
        yield f"shm {entry}", Leak(f"shared memory {entry} was not unlinked", unlink)


def _find_files() -> Iterator[tuple[str, Leak]]:
    # In a folder of `use_temporary_folder` every file counts, elsewhere only files with colocate in the name.
    is_private = tempfile.tempdir is not None and tempfile.tempdir == os.environ.get("TMPDIR")
    for entry in Path(tempfile.gettempdir()).iterdir():
        if not entry.name.startswith("torchinductor_") and (
            is_private or "colocate" in entry.name
        ):  # This skips torch's cache.
            remove = lambda entry=entry: _remove_entry(entry)  # noqa: E731
            yield f"file {entry}", Leak(f"temporary file {entry} is still there", remove if is_private else None)


def _remove_entry(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)

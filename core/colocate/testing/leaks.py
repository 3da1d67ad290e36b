"""What a piece of code leaves behind in this process and below it: what there is afterwards, and wasn't before."""

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
from colocate._system.lines import at
from colocate._worker_group.worker_group import WorkerGroup
from colocate.keeper import forks
from colocate.testing.waiting import becomes_true
from colocate.wire._forks import is_tracked
from colocate.worker.birth.processes import MODULE, arguments_of
from colocate.worker.birth.template import MODE

_PATIENCE_S = 10.0
_HELD_S = 1.0
_ENDS_WITHIN_S = 5.0
_CLOSES_WITHIN_S = 2.0
_LAST_WORDS = "What can be closed has been closed; the rest is not counted against the tests that follow."
_FIRST = "left behind: "
_MORE = " " * len(_FIRST)
_OF_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
# Threads that are the process's, and stay. Dask's is of a pool that its module has: a GPU uses it from the start.
_LASTING = (COURIER, forks.THREAD, "Dask-Offload", "tqdm_monitor")
_watches: list[Watch] = []


@attrs.frozen(eq=False)
class Thing:
    """Something that a test may leave behind.

    Attributes:
        words: What it is, and what is wrong with it.
        close: Does away with it; None where that isn't safe.
        group: The key of the group that it goes with.
        parent: The process that started it, where it is one.
        is_resident: Whether it may be freed by the garbage collector.
        is_ours: Whether colocate has made it for itself.
    """

    words: str
    close: Callable[[], object] | None = None
    group: str | None = None
    parent: int | None = None
    is_resident: bool = False
    is_ours: bool = False


class Watch:
    """What there was at one moment; `check` fails if there is more later.

    Attributes:
        shares_engines: Whether runtimes that outlive it may start what they need later: threads and connections of
            colocate's own, and processes below those that there were.
    """

    shares_engines = False

    def __init__(self) -> None:
        self._before = set(everything())
        self._told: list[str] = []
        _watches.append(self)

    def leaked(self) -> list[str]:
        """Return what there is more now, in words."""
        return [thing.words for thing in self._left().values()]

    def settle(self, spared: Owned | None = None) -> None:
        """Take note of colocate's own objects that are left, and close them; all but one that somebody else closes."""
        found = {key: thing for key, thing in live_objects().items() if key not in self._before}
        if spared is not None:
            found.pop(_key_of(spared), None)
        found = {key: thing for key, thing in found.items() if thing.group not in found}
        if any(thing.is_resident for thing in found.values()):  # their handles may be in a cycle
            gc.collect()

            def freed() -> bool:  # or held a moment longer, by a thread that has yet to let go of what it has raised
                nonlocal found
                found = {key: thing for key, thing in live_objects().items() if key in found}
                return not any(thing.is_resident for thing in found.values())

            becomes_true(freed, _HELD_S)
        self._told += [thing.words for thing in found.values()]
        for thing in found.values():  # owners come first, and close what they own
            self._told += _closed(thing)

    def check(self) -> None:
        """Fail if something is left, after what is on its way out has had time to go. Close what can be closed.

        Raises:
            AssertionError: Says what is left.
        """
        report: list[str] | None = None
        try:
            self.settle()
            left = self._left()

            def gone() -> bool:  # what wasn't there all the time is somebody's at work: Dask's look at the machine, say
                nonlocal left
                now = self._left()
                left = {key: thing for key, thing in left.items() if key in now}
                return not left

            if left:
                gc.collect()
                becomes_true(gone, _PATIENCE_S)
            report = [*self._told, *(thing.words for thing in left.values())]
            for thing in left.values():
                report += _closed(thing)
        finally:
            self._end(clean=report == [])
        if report:
            raise AssertionError("\n".join([_FIRST + report[0], *(_MORE + words for words in report[1:]), _LAST_WORDS]))

    def dismiss(self) -> None:
        """Close what can be closed, and say nothing: the test has failed, and there is enough to read."""
        try:
            self.settle()
            for thing in self._left().values():
                _closed(thing)
        finally:
            self._end()

    def adopt(self, more: Iterable[str]) -> None:
        """Take what has been made since for a part of what there was."""
        self._before.update(more)

    def _left(self) -> dict[str, Thing]:
        now = everything()
        leaks = {key: thing for key, thing in now.items() if key not in self._before}
        if not self.shares_engines:
            return leaks
        pids = {int(key.split()[1]): key for key in now if key.startswith("process ")}

        def is_of_engine(thing: Thing) -> bool:
            if thing.parent not in pids:
                return thing.is_ours
            above = pids[thing.parent]
            return above not in leaks or is_of_engine(leaks[above])

        return {key: thing for key, thing in leaks.items() if not is_of_engine(thing)}

    def _end(self, clean: bool = False) -> None:
        _watches.remove(self)
        if _watches and not clean:  # what has been told isn't told again
            leaks = self._left()
            for outer in _watches:
                outer.adopt(leaks)


def _closed(thing: Thing) -> list[str]:
    """Close a thing; return what went wrong with that."""
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
def shared() -> Iterator[None]:
    """Have what is made inside be shared by several tests: whoever made it closes it, later."""
    before = everything()
    try:
        yield
    finally:
        new = [key for key in everything() if key not in before]
        for watch in _watches:
            watch.adopt(new)


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


# -- what there is: by keys that are never those of something else later


def everything() -> dict[str, Thing]:
    """Return all that a test may leave behind."""
    return {
        key: thing
        for things in (live_objects().items(), _processes(), _threads(), _descriptors(), _memory(), _files())
        for key, thing in things
    }


def live_objects() -> dict[str, Thing]:
    """Return runtimes, pools and groups that are open, and the scopes and residents of groups; owners first."""
    connection = sys.modules.get("colocate._api.connection")
    nodes = list(connection.live.values()) if connection is not None else []
    return {key: thing for node in nodes for key, thing in _below(node)}


def _below(node: Owned) -> Iterator[tuple[str, Thing]]:
    def close() -> None:
        node.close_for("the leak check of its test", _CLOSES_WITHIN_S, True)

    if node.alive:  # neither closed nor the parent's of a fork
        yield _key_of(node), Thing(f"{node.kind} {node.name!r}, made at {_at(node.line)}, was left open", close)
    for child in list(node.children.values()):
        yield from _below(child)
    if isinstance(node, WorkerGroup) and node.alive:
        yield from _kept(node)


def _key_of(node: Owned) -> str:
    return f"{node.kind} {id(node)} {node.created}"


def _at(line: tuple[str, int]) -> str:
    path, number = line
    return at((path.removeprefix(os.getcwd() + os.sep), number))


def _kept(group: WorkerGroup) -> Iterator[tuple[str, Thing]]:
    residents, of_group = group.residents, _key_of(group)
    for scope in list(residents.scopes):
        words = f"a scope of group {group.name!r}, entered at {_at(scope.line)}, was left open"
        leave = lambda scope=scope: residents.leave(scope)  # noqa: E731
        yield f"scope {id(scope)} {group.created}", Thing(words, leave, of_group)
    for kept in list(residents.kept.values()):
        # One whose call has failed holds nothing; what is in a scope is told with that.
        if kept.freed_by is None and kept.call._error is None and not any(kept in s.kept for s in residents.scopes):
            label = f"the resident of {kept.source.label} in group {group.name!r}"
            words = f"{label}, kept at {_at(kept.call.line)}, was not freed"
            free = lambda kept=kept: residents.release(kept, "the leak check of its test")  # noqa: E731
            yield f"resident {kept.source.key} {group.created}", Thing(words, free, of_group, is_resident=True)


def _processes() -> Iterator[tuple[str, Thing]]:
    tracker = _tracker_has("_pid")
    for pid in sorted(_children_of(os.getpid())):
        with contextlib.suppress(psutil.NoSuchProcess), (process := psutil.Process(pid)).oneshot():
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            is_template = not is_zombie and (arguments_of(process, MODULE) or [""])[0] == MODE  # it ends by itself
            if process.pid != tracker and not is_template:
                command = "a zombie" if is_zombie else " ".join(process.cmdline())[:200]
                words = f"process {process.pid} ({command}) {'was never waited for' if is_zombie else 'still runs'}"
                end = lambda process=process: _end(process)  # noqa: E731
                yield f"process {process.pid} {process.create_time()}", Thing(words, end, parent=process.ppid())


def _children_of(pid: int) -> set[int]:
    """Return all processes below one, from the kernel's own lists where it has them: psutil looks at each process."""
    try:
        # Twice: such a list may lack somebody after whose elder has ended as it was read.
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children") for _ in range(2)]
    except OSError:  # it, or a thread of it, has ended meanwhile
        lists = []
    if not lists:
        with contextlib.suppress(psutil.NoSuchProcess):
            return {process.pid for process in psutil.Process(pid).children(recursive=True)}
        return set()
    children = {int(child) for line in lists for child in line.split()}
    return children.union(*map(_children_of, children))


def _tracker_has(name: str) -> object:
    """Return what Python's own tracker of shared memory has: it starts with the first use, ends with the process."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    return getattr(getattr(module, "_resource_tracker", None), name, None)


def _end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    for obj in gc.get_objects():  # an object that stands for the process is to hear of its end
        if issubclass(type(obj), subprocess.Popen) and obj.pid == process.pid:
            obj.wait(_ENDS_WITHIN_S)
    process.wait(_ENDS_WITHIN_S)  # takes a zombie away too


def _threads() -> Iterator[tuple[str, Thing]]:
    for thread in threading.enumerate():
        if not thread.name.startswith(_LASTING):
            is_ours = thread.name.startswith("colocate-")
            yield f"thread {id(thread)} {thread.name}", Thing(f"thread {thread.name!r} still runs", is_ours=is_ours)


def _descriptors() -> Iterator[tuple[str, Thing]]:
    # Who has used a GPU has its descriptors to the end; pytest's capture changes the first three.
    known_descriptors = {0, 1, 2, _tracker_has("_fd")}
    groups: Any = sys.modules.get("colocate.features.process_groups.alone")  # else nobody has made any
    lasting = () if groups is None else groups.lasting_descriptors()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            number, target = int(name), os.readlink(f"/proc/self/fd/{name}")
            is_of_process = number in known_descriptors or (number, target) in lasting or forks.own_descriptor(number)
            if not is_of_process and not target.startswith(_OF_GPUS):
                words = f"file descriptor {name} ({target}) is still open"
                yield f"descriptor {name} {target}", Thing(words, is_ours=is_tracked(number))


def _memory() -> Iterator[tuple[str, Thing]]:
    """Yield memory that is shared with other processes: what is mapped here, and what has a name of this process."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        if "/memfd:" in line or ("/dev/shm/" in line and "/dev/shm/sem." not in line):  # locks stay for the process
            address, *_, path = line.split(maxsplit=5)
            yield f"mapping {address.partition('-')[0]} {path}", Thing(f"shared memory {path} is still mapped")
    for entry in Path("/dev/shm").glob(f"*_{os.getpid()}_*"):
        unlink = lambda entry=entry: entry.unlink(missing_ok=True)  # noqa: E731
        yield f"shm {entry}", Thing(f"shared memory {entry} was not unlinked", unlink)


def _files() -> Iterator[tuple[str, Thing]]:
    # In a folder of our own everything is ours (see `own_temporary_folder`), elsewhere what has our name.
    is_private = tempfile.tempdir is not None and tempfile.tempdir == os.environ.get("TMPDIR")
    for entry in Path(tempfile.gettempdir()).iterdir():
        if not entry.name.startswith("torchinductor_") and (
            is_private or "colocate" in entry.name
        ):  # torch's own cache
            remove = lambda entry=entry: _remove(entry)  # noqa: E731
            yield f"file {entry}", Thing(f"temporary file {entry} is still there", remove if is_private else None)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)

"""Which line of the user's code made a thread, a process, a file or a socket, for those who look for what is left.

Only while somebody asks for it. Files, sockets and mappings are heard of by Python's audit events; threads, processes,
pipes and copies of descriptors by functions that are wrapped meanwhile. What is made by none of these (whatever a
library makes in C) has no line.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.process as multiprocessing_process
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import colocate
from colocate._system.lines import at as as_text
from colocate._system.off_main import frames

_COLOCATE = os.path.dirname(os.path.abspath(colocate.__file__)) + os.sep
_OF_COLOCATE = ("colocate_local", "colocate_ray", "colocate_dask")
_LIBRARIES = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_SITE = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")})

_Line = tuple[str, int]

_lock = threading.RLock()  # a finalizer that opens a file may run while it is held
_users = 0
_installed = False
_restore: list[Callable[[], None]] = []
_threads: weakref.WeakKeyDictionary[threading.Thread, _Line] = weakref.WeakKeyDictionary()
_sockets: weakref.WeakKeyDictionary[socket.socket, _Line] = weakref.WeakKeyDictionary()
_popens: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()
_processes: dict[int, _Line] = {}
_paths: dict[str, _Line] = {}
_descriptors: dict[int, tuple[str, _Line]] = {}  # what it led to then, and the line
_by_colocate: weakref.WeakSet[object] = weakref.WeakSet()
_mapped: dict[str, _Line | None] = {}
_kinds: dict[str, str] = {}  # whose code a file is
_looks: set[int] = set()  # threads whose own files nobody asks for


def begin() -> None:
    """Take note of lines from now on, until as many have called `end`."""
    global _users, _installed
    with _lock:
        _users += 1
        if _users > 1:
            return
        if not _installed:
            sys.addaudithook(_heard)  # can't be taken away again: it does nothing while nobody asks
            _installed = True
        _wrap()


def end() -> None:
    """Need no lines any more."""
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        while _restore:
            _restore.pop()()
        for book in (_threads, _sockets, _processes, _paths, _descriptors, _mapped):
            book.clear()
        _popens.clear()
        _by_colocate.clear()


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Whoever looks at what there is opens hundreds of files, and leaves none."""
    me = threading.get_ident()
    _looks.add(me)
    try:
        yield
    finally:
        _looks.discard(me)


def of_thread(thread: threading.Thread) -> str | None:
    """The line that started it."""
    return at(_threads.get(thread))


def of_process(pid: int) -> str | None:
    """The line that started it."""
    return at(_processes.get(pid))


def of_descriptor(number: int, target: str) -> str | None:
    """The line that opened it."""
    owner = socket_of(number)
    if owner is not None:
        return at(_sockets.get(owner))
    led_to, line = _descriptors.get(number, ("", None))
    return at(line) if led_to == target else of_path(target)


def is_of_colocate(thing: object) -> bool:
    """Whether it is a thread or a socket that colocate has made for itself."""
    return thing in _by_colocate


def of_path(path: str) -> str | None:
    """The line that made a file or a folder."""
    path = os.path.realpath(path)
    return at(next((line for made, line in reversed(list(_paths.items())) if os.path.realpath(made) == path), None))


def mapped() -> dict[str, str]:
    """Shared memory that has a name and was mapped here, with the line."""
    return {path: at(line) or "an unknown line" for path, line in list(_mapped.items())}


def socket_of(number: int) -> socket.socket | None:
    """The socket object that owns a descriptor, if it was made while lines were noted."""
    return next((sock for sock in list(_sockets) if sock.fileno() == number), None)


def popen_of(pid: int) -> subprocess.Popen[Any] | None:
    """The object that stands for a process, if it was made while lines were noted."""
    return next((popen for popen in list(_popens) if popen.pid == pid), None)


def at(line: tuple[str, int] | None) -> str | None:
    """A line as messages have it."""
    if line is None:
        return None
    path, number = line
    here = os.getcwd() + os.sep
    return as_text((path.removeprefix(here), number))


def _line(thing: object = None) -> _Line | None:
    """The innermost line that is no library's; failing that, of a library that isn't Python's."""
    second: _Line | None = None
    for frame in frames():
        name = frame.f_code.co_filename
        kind = _kinds.get(name)
        if kind is None:
            kind = _kinds[name] = _kind(frame, name)
        if kind == "the user's":
            return name, frame.f_lineno
        if kind == "colocate's" and thing is not None:
            _by_colocate.add(thing)
        elif kind == "a library's" and second is None:
            second = name, frame.f_lineno
    return second


def _kind(frame: FrameType, name: str) -> str:
    if name.startswith("<") or name == __file__:
        return "nobody's"
    if name.startswith(_COLOCATE) or str(frame.f_globals.get("__name__")).partition(".")[0] in _OF_COLOCATE:
        return "colocate's"
    if name.startswith(_SITE):
        return "a library's"
    return "Python's" if name.startswith(_LIBRARIES) else "the user's"


# -- audit events: called for every event of the process, so the way out is short


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if _users and (take := _EVENTS.get(event)) is not None:
        take(args)


def _opened(args: tuple[Any, ...]) -> None:
    path = args[0]
    if isinstance(path, str) and path.endswith(".pyc"):  # imports open many
        return
    if threading.get_ident() in _looks:
        return
    if isinstance(path, (str, bytes)) and (line := _line()) is not None:
        path = os.path.abspath(os.fsdecode(path))
        _paths.pop(path, None)  # the last one is the last
        _paths[path] = line


def _made_socket(args: tuple[Any, ...]) -> None:
    sock = args[0]
    if isinstance(sock, socket.socket) and (line := _line(sock)) is not None:
        _sockets[sock] = line


def _made_mapping(args: tuple[Any, ...]) -> None:
    descriptor = args[0]
    target = _target(descriptor)  # none: it isn't open, which whoever maps it will be told
    if target.startswith(("/dev/shm/", "/memfd:")):
        _mapped.setdefault(target, _line())


_EVENTS: dict[str, Callable[[tuple[Any, ...]], None]] = {
    "open": _opened,
    "os.mkdir": _opened,
    "tempfile.mkstemp": _opened,
    "tempfile.mkdtemp": _opened,
    "socket.__new__": _made_socket,
    "mmap.__new__": _made_mapping,
}


# -- threads, processes, descriptors: there is no event for the first and last in Python 3.11, and none that has the pid


def _wrap() -> None:
    for name in ("pipe", "pipe2", "dup", "dup2", "eventfd", "memfd_create", "openpty"):
        if (make := getattr(os, name, None)) is not None:
            _replace(os, name, _noting(make), make)
    fork, popen, start = os.fork, subprocess.Popen.__init__, multiprocessing_process.BaseProcess.start
    start_thread = threading.Thread.start

    def noted_fork() -> int:
        pid = fork()
        if pid:
            _note(pid)
        return pid

    def noted_popen(self: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
        popen(self, *args, **kwargs)
        _popens.add(self)
        _note(self.pid)

    def noted_start(self: multiprocessing_process.BaseProcess) -> None:
        start(self)
        if self.pid is not None:
            _note(self.pid)

    def noted_thread(self: threading.Thread) -> None:
        line = _line(self)
        if line is not None:
            _threads[self] = line
        start_thread(self)

    _replace(threading.Thread, "start", noted_thread, start_thread)
    _replace(os, "fork", noted_fork, fork)
    _replace(subprocess.Popen, "__init__", noted_popen, popen)
    _replace(multiprocessing_process.BaseProcess, "start", noted_start, start)


def _noting(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def noted(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if (line := _line()) is not None:
            for number in made if isinstance(made, tuple) else (made,):
                _descriptors[number] = _target(number), line
        return made

    return noted


def _target(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _note(pid: int) -> None:
    line = _line()
    if line is not None:
        _processes[pid] = line


def _replace(owner: Any, name: str, new: Any, old: Any) -> None:
    setattr(owner, name, new)
    _restore.append(lambda: setattr(owner, name, old) if getattr(owner, name) is new else None)

"""The template: a process with one thread and no role, of which workers are forks. They share what it has imported.

    starter → template
            → supervisor → supervisor → worker → whatever roles start

It is its starter's child, and so are the processes that it forks, its siblings (`CLONE_PARENT`). So a worker is below
its starter as one that was started by itself is: whoever waits for it, kills it, or ends with it does so in the same
way, and the end of the template is the end of nothing else. Such a fork has the template's command line and environment
in its memory, from which the kernel shows them; it writes its own there, so that the machine's processes show whose it
is.

A fork has one thread, and of other threads only the locks that they held. So the template never starts one, and forks
only while the kernel says that it has one: it imports what workers import first and, once a role needs it, torch, but
nothing of a user's and no engine; it computes nothing, and asks CUDA nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import os
import pickle
import platform
import re
import resource
import select
import signal
import socket
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from colocate._system.installed import version_of
from colocate._system.libc import MADV_COLLAPSE, advise_large, die_with
from colocate._system.own_modules import keep_modules
from colocate.worker.birth.imports import imported_already
from colocate.worker.birth.signals import LEFT

MODE = "forks"
"""What a template's command line has in the place of a worker's descriptor."""

ROOM = "COLOCATE_ROOM"
"""The variable that a template is started with so that the environments of its forks have room."""

ARGUMENTS_BYTES = 512
"""How much room there is for what follows the module on a command line."""

TOLD_BYTES = 1 << 18
"""The longest request. An environment that is longer starts an interpreter of its own."""

_QUIET_S = 10.0
"""What forks have imported is imported here after so long, or before the next fork: a short script has none."""

_MANY = 8
"""How many forks make it worth the time to have memory in large pages: as long as ten of them take with torch."""

_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT = 0x8000


@attrs.frozen
class Wanted:
    """A worker to be forked. With it come its output, its socket, where to answer, and its folder, as descriptors."""

    arguments: tuple[str, ...]  # what follows the module on its command line, with its socket's descriptor left out
    env: Mapping[str, str]  # all of its environment
    imports: tuple[str, ...]  # what the template imports before, if it hasn't
    umask: int  # for the files that it makes
    limits: Mapping[int, tuple[int, int]]  # of its resources
    cpus: frozenset[int]  # those that it may run on


class Template:
    """Forks workers."""

    def __init__(self) -> None:
        _, _, starter, sock, *_ = sys.argv
        die_with(int(starter))
        for number in LEFT:
            signal.signal(number, signal.SIG_IGN)
        self._sock = socket.socket(fileno=int(sock))
        self._sock.set_inheritable(False)
        self._shown = _Shown()
        self._reads, self._writes = os.pipe()  # the names of what its forks have imported
        self._modules, self._forks = 0, 0  # how many it has imported, and how often it has forked since
        _import(["colocate.worker.birth.main"])
        keep_modules()

    def run(self) -> None:
        """Fork workers until the starter is gone, and return in each of them, as in one that was started by itself."""
        gc.disable()
        news = select.poll()  # not select: it can't take descriptors from 1024 on
        for each in (self._sock.fileno(), self._reads):
            news.register(each, select.POLLIN)
        told: list[str] = []
        descriptors: list[int] = []
        while True:
            gc.freeze()  # what is here is never garbage, and a collector that looked at it would write into it
            ready = dict(news.poll(_QUIET_S * 1000 if told else None))
            if self._reads in ready:
                told += os.read(self._reads, select.PIPE_BUF).decode().split()
                continue
            data = b""
            if ready:
                data, descriptors, _, _ = socket.recv_fds(self._sock, TOLD_BYTES, 4)
                if not data:
                    os._exit(0)
            _import(told)
            told.clear()
            if data and self._fork(pickle.loads(data), descriptors):
                return

    def _fork(self, wanted: Wanted, descriptors: Sequence[int]) -> bool:
        """Whether this is the fork, ready to be a worker. Otherwise its starter has been answered, or will be by it."""
        output, lane, answer, folder = descriptors
        fork = False
        try:
            _import(wanted.imports)
            if (threads := len(os.listdir("/proc/self/task"))) != 1:
                raise OSError(f"it has {threads} threads, of which a fork would have one")
            if "transformers" in sys.modules and (name := different(wanted.env, os.environ, _TRANSFORMERS)):
                raise OSError(f"it has imported transformers, which reads {name} then")
            if self._modules != len(sys.modules):
                self._modules, self._forks = len(sys.modules), 0
            self._forks += 1
            if self._forks == _MANY:
                gather()
            fork = _clone() == 0
            if fork:
                self._become(wanted, output, lane, folder)
        except BaseException as error:
            os.write(answer, f"{os.getpid() if fork else 0} {type(error).__name__}: {error}".encode())
            if fork:
                os._exit(1)
        finally:
            if fork:
                os.write(answer, str(os.getpid()).encode())
            for descriptor in (output, answer, folder, *(() if fork else (lane,))):
                os.close(descriptor)
        return fork

    def _become(self, wanted: Wanted, output: int, lane: int, folder: int) -> None:
        os.setpgid(0, 0)
        os.set_inheritable(lane, False)
        arguments = [str(lane), *wanted.arguments]
        self._shown.write(arguments, wanted.env)
        sys.argv[1:] = arguments
        os.environ.clear()
        os.environ.update(wanted.env)
        os.fchdir(folder)
        os.umask(wanted.umask)
        for limit, values in wanted.limits.items():
            if resource.getrlimit(limit) != values:
                resource.setrlimit(limit, values)
        os.sched_setaffinity(0, wanted.cpus)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(output, number)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115  # the template's is for another kind
        self._sock.close()
        os.close(self._reads)
        global _writes
        _writes = self._writes
        _told.update(name for name in LONG if name in sys.modules)


class _Shown:
    """The memory from which the kernel shows a process's command line and environment (`proc_pid_cmdline(5)`)."""

    def __init__(self) -> None:
        with open("/proc/self/stat", "rb") as file:
            found = file.read().rpartition(b")")[2].split()[45:49]
        self._arguments, self._end, self._env, self._env_end = map(int, found)
        # Then nothing of this process's reads that memory any more.
        os.environ.pop(ROOM)
        for name, value in os.environb.items():
            os.putenv(name, value)
        words = ctypes.string_at(self._arguments, self._end - self._arguments).split(b"\0")
        self._before = words[: words.index(b"colocate.worker") + 1]

    def write(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Show others.

        Raises:
            OSError: They have no room.
        """
        words = [*self._before, *map(os.fsencode, arguments), b""]
        words[-1] = b" " * (self._end - self._arguments - sum(len(word) + 1 for word in words))
        variables = [os.fsencode(f"{name}={env[name]}") for name in env]
        for start, end, strings, what in (
            (self._arguments, self._end, words, "command line"),
            (self._env, self._env_end, variables, "environment"),
        ):
            data = b"".join(string + b"\0" for string in strings)
            if len(data) > end - start:
                raise OSError(errno.E2BIG, f"there is no room for its {what}")
            ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def different(one: Mapping[str, str], other: Mapping[str, str], pattern: re.Pattern[str]) -> str | None:
    """Return the first variable that matches and isn't the same in two environments; None when there is none."""
    names = sorted(name for name in one.keys() | other.keys() if pattern.match(name))
    return next((name for name in names if one.get(name) != other.get(name)), None)


def _import(names: Sequence[str]) -> None:
    if all(name in sys.modules for name in names):
        return
    try:
        os.getcwd()  # as torch's compiler does when it is imported
    except FileNotFoundError:  # its starter's folder of then is gone; each fork goes to that of its own starter
        os.chdir("/")
    # The last is what torch's compiler imports in an exit handler: each fork would do so for itself.
    compiles = not {"torch._dynamo", "tensordict"}.isdisjoint(names)
    for name in (*names, *(["tabulate"] if compiles else [])):
        with contextlib.suppress(ImportError):  # not here: the role that needs it will say so
            importlib.import_module(name)
    if _METADATA in names:  # its forks find known what lies in the folders of the path
        version_of("colocate")
    imported_already.cache_clear()
    imported_already()
    # What libraries would take apart at the end of an interpreter is this one's, and its forks end without.
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def gather() -> None:
    """Have what this process has written in large pages, where the kernel can (Linux 6.1).

    A fork copies an entry for each page, and so do the two of its supervisors: with torch imported that takes a worker
    more processor time than all else that it does until it is ready. What a fork writes it gets in small pages.
    """
    with open("/proc/self/maps") as file:
        found = [line.split() for line in file]
    for addresses, permissions, _, _, inode, *name in found:
        if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            advise_large(start, end, MADV_COLLAPSE)


def _clone() -> int:
    """Fork a sibling: like `os.fork`, but the child is that of this one's parent. Its first fork puts right the rest.

    Raises:
        OSError: The kernel doesn't.
    """
    number = _CLONE.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of clone(2) isn't known on {platform.machine()}")
    libc: Any = ctypes.PyDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    pid: int = libc.syscall(
        ctypes.c_long(number), ctypes.c_long(_CLONE_PARENT | signal.SIGCHLD), *[ctypes.c_long(0)] * 4
    )
    if pid < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return pid


_METADATA = "email.parser"  # imported when the version of a role's distribution is looked up for the first time

LONG = (
    *("torch", "torch._dynamo", "tensordict", "transformers", "transformers.modeling_utils"),
    *("numpy", "psutil", _METADATA, "asyncio"),
)
"""What takes long to import, and starts no thread then: workers find it imported when roles before them needed it.

Torch's optimizers import `torch._dynamo` when the first of them is made, which takes as long as torch itself.
"""

_TRANSFORMERS = re.compile(
    "HF_|HUGGINGFACE_|TRANSFORMERS_|SAFETENSORS_|(HOME|XDG_CACHE_HOME|DISABLE_TELEMETRY|DO_NOT_TRACK|USE_TORCH_XLA)$"
)
"""What transformers and the libraries below it read when they are imported."""

_writes: int | None = None
_told: set[str] = set()


def tell_imports() -> None:
    """Have the workers after this one find imported what the roles of this one have imported."""
    if _writes is not None and (names := {name for name in LONG if name in sys.modules} - _told):
        _told.update(names)
        with contextlib.suppress(OSError):  # the template has ended
            os.write(_writes, " ".join([*sorted(names), ""]).encode())


def renew() -> None:
    """Make a worker's own what forks of one process have alike, but for random numbers, which are each role's own."""
    if _writes is None:  # it was started by itself
        return
    gc.enable()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)
    files: Any = sys.modules.get("tempfile")
    if files is not None:
        files.tempdir = None

"""The template is a process with one thread and no role. Its forks are workers, which share its imports.

    starter → template
            → supervisor → supervisor → worker → whatever roles start

The template is its starter's child, and so are its forks, as siblings (`CLONE_PARENT`). So a forked worker is below the
starter like a worker that was started by itself: it is waited for, killed, and ended with the starter in the same way,
and the end of the template ends nothing else. The kernel shows a process's command line and environment from the
process's memory, which a fork shares with the template: the worker writes its own there, so that process listings show
its owner.

A fork has one thread, and of other threads only the locks that they held. So the template never starts a thread, and
forks only while the kernel counts one. It imports the modules that workers import first and, once a role needs it,
torch, but no user's module and no engine; it computes nothing, and doesn't initialize CUDA.
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

from colocate._system.installed import get_version
from colocate._system.libc import MADV_COLLAPSE, advise_large, die_with
from colocate._system.own_modules import preload_modules
from colocate.worker.birth.imports import list_early_imports
from colocate.worker.birth.signals import IGNORED

MODE = "forks"
"""Argument that makes a worker's command line a template's, in place of the descriptor."""

ROOM = "COLOCATE_ROOM"
"""Variable that reserves memory for the environments of the template's forks."""

ARGUMENTS_BYTES = 512
"""Bytes reserved on the command line after the module's name."""

REQUEST_BYTES = 1 << 18
"""Limit of a fork request, in bytes. A longer environment starts an interpreter of its own."""

_QUIET_S = 10.0
"""Seconds until the template imports the modules that forks have imported, if no fork comes before."""

_MANY = 8
"""Number of forks after which memory is moved to large pages, which takes as long as ten forks with torch."""

_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT = 0x8000


@attrs.frozen
class ForkRequest:
    """Request for a fork. Four descriptors follow: output, the worker's socket, a pipe for the answer, the folder."""

    arguments: tuple[str, ...]  # Command-line arguments after the module's name, without the socket's descriptor.
    env: Mapping[str, str]  # The worker's complete environment.
    imports: tuple[str, ...]  # Modules that the template imports before the fork.
    umask: int  # The worker's umask.
    limits: Mapping[int, tuple[int, int]]  # The worker's resource limits, by number.
    cpus: frozenset[int]  # The worker's CPU affinity.


class Template:
    """Forks workers on request."""

    def __init__(self) -> None:
        _, _, starter, sock, *_ = sys.argv
        die_with(int(starter))
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        self._sock = socket.socket(fileno=int(sock))
        self._sock.set_inheritable(False)
        self._shown = _CommandLine()
        self._read_end, self._write_end = os.pipe()  # Through this pipe, forks report the names of imported modules.
        self._modules, self._forks = 0, 0  # Number of imported modules, and number of forks since the last import.
        _import_all(["colocate.worker.birth.main"])
        preload_modules()

    def serve_forks(self) -> None:
        """Fork workers until the starter has exited. In each fork, return as in a new worker process."""
        gc.disable()
        news = select.poll()  # `select` can't handle descriptors above 1023.
        for descriptor in (self._sock.fileno(), self._read_end):
            news.register(descriptor, select.POLLIN)
        names: list[str] = []
        descriptors: list[int] = []
        while True:
            gc.freeze()  # These objects are never garbage, and a collection in a fork would write to shared pages.
            ready = dict(news.poll(_QUIET_S * 1000 if names else None))
            if self._read_end in ready:
                names += os.read(self._read_end, select.PIPE_BUF).decode().split()
                continue
            data = b""
            if ready:
                data, descriptors, _, _ = socket.recv_fds(self._sock, REQUEST_BYTES, 4)
                if not data:
                    os._exit(0)
            _import_all(names)
            names.clear()
            if data and self._fork(pickle.loads(data), descriptors):
                return

    def _fork(self, wanted: ForkRequest, descriptors: Sequence[int]) -> bool:
        """Fork a worker, and return whether this process is the fork. The starter gets the fork's pid, or an error."""
        output, lane, answer, folder = descriptors
        fork = False
        try:
            _import_all(wanted.imports)
            if (threads := len(os.listdir("/proc/self/task"))) != 1:
                raise OSError(f"it has {threads} threads, of which a fork would have one")
            if "transformers" in sys.modules and (name := find_difference(wanted.env, os.environ, _TRANSFORMERS)):
                raise OSError(f"it has imported transformers, which reads {name} then")
            if self._modules != len(sys.modules):
                self._modules, self._forks = len(sys.modules), 0
            self._forks += 1
            if self._forks == _MANY:
                collapse_pages()
            fork = _fork_sibling() == 0
            if fork:
                self._set_up_fork(wanted, output, lane, folder)
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

    def _set_up_fork(self, wanted: ForkRequest, output: int, lane: int, folder: int) -> None:
        os.setpgid(0, 0)
        os.set_inheritable(lane, False)
        arguments = [str(lane), *wanted.arguments]
        self._shown.replace(arguments, wanted.env)
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
            # The template's own streams may have another configuration.
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
        self._sock.close()
        os.close(self._read_end)
        global _writes
        _writes = self._write_end
        _announced.update(name for name in LONG if name in sys.modules)


class _CommandLine:
    """The memory from which the kernel shows this process's command line and environment (`proc_pid_cmdline(5)`)."""

    def __init__(self) -> None:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()[45:49]
        self._arguments, self._end, self._env, self._env_end = map(int, fields)
        # The loop copies all variables elsewhere, so that the process itself doesn't read that memory any more.
        os.environ.pop(ROOM)
        for name, value in os.environb.items():
            os.putenv(name, value)
        words = ctypes.string_at(self._arguments, self._end - self._arguments).split(b"\0")
        self._before = words[: words.index(b"colocate.worker") + 1]

    def replace(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Write a new command line and environment for other processes to see.

        Raises:
            OSError: The reserved memory is too small.
        """
        words = [*self._before, *map(os.fsencode, arguments), b""]
        words[-1] = b" " * (self._end - self._arguments - sum(len(word) + 1 for word in words))
        variables = [os.fsencode(f"{name}={env[name]}") for name in env]
        for start, end, strings, label in (
            (self._arguments, self._end, words, "command line"),
            (self._env, self._env_end, variables, "environment"),
        ):
            data = b"".join(string + b"\0" for string in strings)
            if len(data) > end - start:
                raise OSError(errno.E2BIG, f"there is no room for its {label}")
            ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def find_difference(one: Mapping[str, str], other: Mapping[str, str], pattern: re.Pattern[str]) -> str | None:
    """Return the first variable that matches a pattern and differs between two environments; None if there is none."""
    names = sorted(name for name in one.keys() | other.keys() if pattern.match(name))
    return next((name for name in names if one.get(name) != other.get(name)), None)


def _import_all(names: Sequence[str]) -> None:
    if all(name in sys.modules for name in names):
        return
    try:
        os.getcwd()  # Torch's compiler calls os.getcwd() at import, so check here that the folder exists.
    except FileNotFoundError:  # The folder was removed; each fork changes to another folder later.
        os.chdir("/")
    # Torch's compiler imports tabulate in an exit handler, which would happen again in each fork.
    compiles = not {"torch._dynamo", "tensordict"}.isdisjoint(names)
    for name in (*names, *(["tabulate"] if compiles else [])):
        with contextlib.suppress(ImportError):  # A missing module is reported by the role that needs the module.
            importlib.import_module(name)
    if _METADATA in names:  # This caches the folder listings of the import path for the forks.
        get_version("colocate")
    list_early_imports.cache_clear()
    list_early_imports()
    # Forks skip the finalizers that libraries have registered for the end of an interpreter.
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def collapse_pages() -> None:
    """Move this process's writable memory to large pages, if the kernel can (Linux 6.1).

    A fork copies an entry for each page, and so do its two supervisors. With torch imported, that takes more processor
    time than everything else before the worker is ready. Pages that a fork writes to become small pages.
    """
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for addresses, permissions, _, _, inode, *name in mappings:
        if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            advise_large(start, end, MADV_COLLAPSE)


def _fork_sibling() -> int:
    """Fork this process, like `os.fork`, but with this process's parent as the child's parent.

    The child's first `os.fork` repairs the interpreter's state.

    Raises:
        OSError: The kernel refuses.
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


_METADATA = "email.parser"  # This module is imported when a role's distribution version is first looked up.

LONG = (
    *("torch", "torch._dynamo", "tensordict", "transformers", "transformers.modeling_utils"),
    *("numpy", "psutil", _METADATA, "asyncio"),
)
"""Slow imports that start no thread: a template imports them for later workers when a role has needed them.

Torch's optimizers import `torch._dynamo` when the first of them is made, which takes as long as torch itself.
"""

_TRANSFORMERS = re.compile(
    "HF_|HUGGINGFACE_|TRANSFORMERS_|SAFETENSORS_|(HOME|XDG_CACHE_HOME|DISABLE_TELEMETRY|DO_NOT_TRACK|USE_TORCH_XLA)$"
)
"""Variables that transformers and the libraries below read at import."""

_writes: int | None = None
_announced: set[str] = set()


def announce_imports() -> None:
    """Report the slow imports of this worker's roles to the template, for later workers."""
    if _writes is not None and (names := {name for name in LONG if name in sys.modules} - _announced):
        _announced.update(names)
        with contextlib.suppress(OSError):  # The template has ended.
            os.write(_writes, " ".join([*sorted(names), ""]).encode())


def reset_after_fork() -> None:
    """Renew state that all forks of one process would share: garbage collection, authkey and temporary folder.

    Random numbers are renewed for each role.
    """
    if _writes is None:  # This worker isn't a fork of a template.
        return
    gc.enable()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)
    files: Any = sys.modules.get("tempfile")
    if files is not None:
        files.tempdir = None

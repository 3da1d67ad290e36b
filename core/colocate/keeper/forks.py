"""Workers as forks of a template (`worker/birth/template.py`), for whoever starts workers here: one per process.

A fork is up in milliseconds and shares the template's memory, but comes too late for what is read when a process, a
library or the interpreter starts. So an environment is the template's in all of that (`differs`), or the worker gets an
interpreter of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from colocate._system.ends import hear_of_ends, wait_for
from colocate._system.jobs import JobThread, Timer, report_exception
from colocate._system.limits import FORKS_WITHIN_S, TEMPLATE_IDLE_S
from colocate._system.readable import readable
from colocate.gpus import SHOWING
from colocate.worker.birth.template import ARGUMENTS_BYTES, MODE, ROOM, TOLD_BYTES, Wanted, different

THREAD = "colocate-template"

_ROOM_BYTES = 1 << 14
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

_TOO_EARLY = re.compile(
    f"(?!(?:{'|'.join(SHOWING)})$)(?:"  # these are read when GPUs are first used
    "LD_|GLIBC_|MALLOC_|LANG$|LANGUAGE$|LC_|TZ$|OPENSSL_|SSL_"  # read by the loader, the C library and OpenSSL
    "|PYTHON|COVERAGE_|COV_CORE_"  # by Python, and what is imported at its start
    "|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|GOTO_|BLIS_|NPY_|NUMPY_|NUMEXPR_"  # by numerical libraries
    "|TD_|EXCLUDE_TD_|DISPATCH_TDNN|LIST_TO_STACK$|CAPTURE_NONTENSOR_STACK$|LAZY_LEGACY_OP$"  # by tensordict
    "|CUDA_|CUBLAS_|CUDNN_|NVIDIA_|HIP_|ROCR_|HSA_|PYTORCH_|ATEN_|C10_|KINETO_"  # by torch, and below it
    "|TORCH(?!INDUCTOR_CACHE_DIR$)"  # that one each compilation reads, and the import of its compiler sets
    ")"
)

_logger = logging.getLogger("colocate")


class NoFork(Exception):
    """A worker has to be started by itself; why."""


class Fork:
    """A child of this process.

    Attributes:
        over: Whether it is known to have ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.over = False
        self._exitcode: int | None = None

    def wait(self) -> int | None:
        """Wait for its end; the exit code, or a signal below zero; None where nobody knows."""
        if not self.over:
            self._exitcode = wait_for(self.pid)
            self.over = True
        return self._exitcode

    def kill(self) -> None:
        """End it."""
        if not self.over:
            os.kill(self.pid, signal.SIGKILL)


def started(process: subprocess.Popen[bytes]) -> Fork:
    """Return what shows a process that was started by itself: `subprocess` guesses at an end that nobody knows."""
    process.returncode = 0  # nobody waits for it there, and it may well outlive that object
    return Fork(process.pid)


def differs(env: Mapping[str, str], base: Mapping[str, str]) -> str | None:
    """Return the first variable that a fork comes too late for; None when there is none.

    Args:
        env: What the worker is to have.
        base: What the template was started with.
    """
    return different(env, base, _TOO_EARLY)


def hold(base: Mapping[str, str]) -> None:
    """Have a template ready for workers that will be started, in the background. Until as many `let_go`.

    Args:
        base: The environment of workers for which nobody asks for another.
    """
    _forks.hold(dict(base))


def foresee(base: Mapping[str, str]) -> None:
    """Have a template ready for who may be about to `hold`. It ends when nobody has, after a while."""
    hold(base)
    let_go()


def let_go() -> None:
    """Note that whoever has called `hold` starts no worker any more."""
    _forks.let_go()


def fork(
    arguments: Sequence[str],
    env: Mapping[str, str],
    base: Mapping[str, str],
    sock: socket.socket,
    output: int,
    imports: Sequence[str] | None = (),
) -> Fork:
    """Have a worker forked.

    Args:
        arguments: What follows the descriptor of its socket on its command line.
        env: All of its environment.
        base: That of workers for which nobody asks for another.
        sock: Its socket.
        output: Where its output goes.
        imports: What its roles need (`Boot.imports`).

    Raises:
        NoFork: It can't be one.
    """
    if imports is None:
        raise NoFork("the driver has modules of its own in place of Python's, which the template may have imported")
    if any("=" in name or "\0" in name + value for name, value in env.items()):
        raise NoFork("no process can have its environment")
    if (name := differs(env, base)) is not None:
        raise NoFork(f"env has {name}, which is read when an interpreter or a library starts")
    with open("/proc/self/status") as file:  # the kernel tells the umask there without changing it
        umask = int(file.read().partition("Umask:")[2].split()[0], 8)
    data = pickle.dumps(
        Wanted(
            tuple(arguments),
            dict(env),
            tuple(imports),
            umask,
            {limit: resource.getrlimit(limit) for limit in _LIMITS},
            frozenset(os.sched_getaffinity(0)),
        )
    )
    if len(data) > TOLD_BYTES // 2:  # the kernel wants room for itself
        raise NoFork("its environment is too long")
    return _forks.template(dict(base)).fork(data, sock, output)


def own_process() -> int | None:
    """Return the process id of this one's template; None when it has none."""
    return None if _forks.current is None else _forks.current.pid


def own_descriptor(number: int) -> bool:
    """Return whether a descriptor leads to the template."""
    return (template := _forks.current) is not None and template.sock.fileno() == number


class _Template:
    """The process, and the socket on which it is asked."""

    def __init__(self, base: Mapping[str, str]) -> None:
        """Start it. On a thread with which it and all its forks end."""
        self.base = base
        self.sock, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        env = {**base, "OPENBLAS_NUM_THREADS": "1"}  # it starts threads when it is loaded
        room = _ROOM_BYTES + 2 * sum(len(name) + len(value) + 2 for name, value in env.items())
        command = [sys.executable, "-P", "-m", "colocate.worker", MODE, str(os.getpid()), str(theirs.fileno())]
        hear_of_ends()
        try:
            with theirs:
                process = subprocess.Popen(
                    [*command, " " * ARGUMENTS_BYTES],
                    env={**env, ROOM: " " * room},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                )
        except BaseException:
            self.sock.close()
            raise
        self.pid = process.pid
        self._gone = started(process)

    def fork(self, data: bytes, sock: socket.socket, output: int) -> Fork:
        """Ask for a worker; from any thread."""
        answer, theirs = os.pipe()
        try:
            try:
                folder = os.open(".", os.O_PATH)  # of one that has been removed, too
                try:
                    socket.send_fds(self.sock, [data], [output, sock.fileno(), theirs, folder])
                finally:
                    os.close(folder)
            finally:
                os.close(theirs)
            if not readable(answer, FORKS_WITHIN_S):
                self.end()
                raise NoFork(f"the template hasn't answered for {FORKS_WITHIN_S:g} s, and was ended")
            pid, _, why = os.read(answer, 4096).decode(errors="replace").partition(" ")
        except OSError as error:
            self.end()
            raise NoFork(f"the template can't be asked: {error}") from None
        finally:
            os.close(answer)
        if not pid:
            self.end()
            raise NoFork("the template has ended meanwhile")
        worker = Fork(int(pid))
        if why:
            if worker.pid:
                worker.wait()
            raise NoFork(f"the template can't: {why}")
        return worker

    @property
    def ended(self) -> bool:
        """Whether it has ended: nothing is ever said by it, so whatever can be read is its end."""
        return self.sock.fileno() < 0 or readable(self.sock.fileno(), 0)

    def end(self) -> None:
        """End it, if it hasn't, and wait for that. What it has forked goes on."""
        self.sock.close()
        with contextlib.suppress(OSError):
            self._gone.kill()
        self._gone.wait()


class _Forks:
    """The template of this process, and who needs it."""

    def __init__(self) -> None:
        self.current: _Template | None = None
        self._holders = 0
        self._ends: Timer | None = None
        self._lock = threading.Lock()
        self._thread = JobThread(THREAD, lambda error: report_exception())

    def hold(self, base: dict[str, str]) -> None:
        self._thread.start()  # first: it may raise, and there is nothing to be undone yet
        with self._lock:
            self._holders += 1
            if self._ends is not None:
                self._ends.cancel()

        def warm() -> None:
            with contextlib.suppress(NoFork):  # whoever wants a worker hears of it
                self._here(base)

        self._thread.soon(warm)

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._ends = self._thread.after(TEMPLATE_IDLE_S, self._end)

    def template(self, base: dict[str, str]) -> _Template:
        """Return the template for an environment, which lives."""
        found: list[_Template] = []
        self._thread.run(lambda: found.append(self._here(base)))
        return found[0]

    # -- on the thread with which it ends

    def _end(self) -> None:
        """End the template, unless somebody has begun to need it meanwhile."""
        with self._lock:
            needed = self._holders
        if not needed and self.current is not None:
            self.current.end()
            self.current = None

    def _here(self, base: dict[str, str]) -> _Template:
        present = self.current
        if present is not None and not present.ended and differs(base, present.base) is None:
            return present
        if present is not None:
            present.end()
        self.current = None
        try:
            self.current = _Template(base)
        except (OSError, ValueError) as error:
            raise NoFork(f"no template can be started: {error}") from None
        return self.current

    def forget(self) -> None:
        """Let go of it in a forked child: a copy of the socket would keep the template, which isn't the child's own."""
        if self.current is not None:
            self.current.sock.close()
        self.__init__()  # type: ignore[misc]


_forks = _Forks()
os.register_at_fork(after_in_child=_forks.forget)

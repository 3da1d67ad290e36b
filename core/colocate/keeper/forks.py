"""Workers as forks of a template (`worker/birth/template.py`), which is shared by all starters in this process.

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
    f"(?!(?:{'|'.join(SHOWING)})$)(?:"  # except variables that are read only when GPUs are first used
    "LD_|GLIBC_|MALLOC_|LANG$|LANGUAGE$|LC_|TZ$|OPENSSL_|SSL_"  # read by the loader, the C library and OpenSSL
    "|PYTHON|COVERAGE_|COV_CORE_"  # read by Python, and by modules that are imported at the start
    "|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|GOTO_|BLIS_|NPY_|NUMPY_|NUMEXPR_"  # read by numerical libraries
    "|TD_|EXCLUDE_TD_|DISPATCH_TDNN|LIST_TO_STACK$|CAPTURE_NONTENSOR_STACK$|LAZY_LEGACY_OP$"  # read by tensordict
    "|CUDA_|CUBLAS_|CUDNN_|NVIDIA_|HIP_|ROCR_|HSA_|PYTORCH_|ATEN_|C10_|KINETO_"  # read by torch, and below torch
    "|TORCH(?!INDUCTOR_CACHE_DIR$)"  # read by each compilation, and set by the import of the compiler
    ")"
)

_logger = logging.getLogger("colocate")


class NoFork(Exception):
    """The worker must be started by itself; the message says why."""


class Fork:
    """Child process of this process, worker or template.

    Attributes:
        over: Whether the process is known to have ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.over = False
        self._exitcode: int | None = None

    def wait(self) -> int | None:
        """Wait for the process to end; return the exit code, or minus the signal; None when unknown."""
        if not self.over:
            self._exitcode = wait_for(self.pid)
            self.over = True
        return self._exitcode

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if not self.over:
            os.kill(self.pid, signal.SIGKILL)


def started(process: subprocess.Popen[bytes]) -> Fork:
    """Return a handle for a process started by `subprocess`, which guesses exit codes that other code has collected."""
    process.returncode = 0  # keeps `subprocess` from waiting: the process may outlive the Popen object
    return Fork(process.pid)


def differs(env: Mapping[str, str], base: Mapping[str, str]) -> str | None:
    """Return the first variable that a fork would apply too late; None when there is none.

    Args:
        env: The worker's environment.
        base: The environment with which the template was started.
    """
    return different(env, base, _TOO_EARLY)


def hold(base: Mapping[str, str]) -> None:
    """Start a template in the background, if there is none, and hold the template until a matching `let_go`.

    Args:
        base: The default environment of workers.
    """
    _forks.hold(dict(base))


def foresee(base: Mapping[str, str]) -> None:
    """Start a template for a later `hold`. After an idle timeout it ends if nobody holds it."""
    hold(base)
    let_go()


def let_go() -> None:
    """Release the template held by `hold`."""
    _forks.let_go()


def fork(
    arguments: Sequence[str],
    env: Mapping[str, str],
    base: Mapping[str, str],
    sock: socket.socket,
    output: int,
    imports: Sequence[str] | None = (),
) -> Fork:
    """Fork a worker from the template.

    Args:
        arguments: Command-line arguments after the descriptor of the socket.
        env: The worker's whole environment.
        base: The default environment of workers.
        sock: The worker's socket.
        output: Descriptor for stdout and stderr.
        imports: Modules that the roles need (`Boot.imports`).

    Raises:
        NoFork: The worker can't be a fork.
    """
    if imports is None:
        raise NoFork("the driver has modules of its own in place of Python's, which the template may have imported")
    if any("=" in name or "\0" in name + value for name, value in env.items()):
        raise NoFork("no process can have its environment")
    if (name := differs(env, base)) is not None:
        raise NoFork(f"env has {name}, which is read when an interpreter or a library starts")
    with open("/proc/self/status") as file:  # the kernel shows the umask there without a change
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
    if len(data) > TOLD_BYTES // 2:  # the kernel needs room of its own
        raise NoFork("its environment is too long")
    return _forks.template(dict(base)).fork(data, sock, output)


def own_process() -> int | None:
    """Return the process id of this process's template; None when there is none."""
    return None if _forks.current is None else _forks.current.pid


def own_descriptor(number: int) -> bool:
    """Return whether a descriptor is the socket to the template."""
    return (template := _forks.current) is not None and template.sock.fileno() == number


class _Template:
    """Template process and the socket for fork requests."""

    def __init__(self, base: Mapping[str, str]) -> None:
        """Start the process, on a thread whose end is the end of the template and of all forks."""
        self.base = base
        self.sock, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        env = {**base, "OPENBLAS_NUM_THREADS": "1"}  # OpenBLAS starts threads when it is loaded
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
        """Ask for a fork; from any thread."""
        answer, theirs = os.pipe()
        try:
            try:
                folder = os.open(".", os.O_PATH)  # O_PATH also opens a folder that has been removed
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
        """Whether the process has ended: a template sends nothing, so a readable socket means an end."""
        return self.sock.fileno() < 0 or readable(self.sock.fileno(), 0)

    def end(self) -> None:
        """Kill the template and wait for the exit. Its forks go on."""
        self.sock.close()
        with contextlib.suppress(OSError):
            self._gone.kill()
        self._gone.wait()


class _Forks:
    """The process's template and the number of its holders."""

    def __init__(self) -> None:
        self.current: _Template | None = None
        self._holders = 0
        self._ends: Timer | None = None
        self._lock = threading.Lock()
        self._thread = JobThread(THREAD, lambda error: report_exception())

    def hold(self, base: dict[str, str]) -> None:
        self._thread.start()  # first: the start may raise, before anything has to be undone
        with self._lock:
            self._holders += 1
            if self._ends is not None:
                self._ends.cancel()

        def warm() -> None:
            with contextlib.suppress(NoFork):  # the call that needs the worker reports the error
                self._here(base)

        self._thread.soon(warm)

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._ends = self._thread.after(TEMPLATE_IDLE_S, self._end)

    def template(self, base: dict[str, str]) -> _Template:
        templates: list[_Template] = []
        self._thread.run(lambda: templates.append(self._here(base)))
        return templates[0]

    # -- on the thread whose end is the template's

    def _end(self) -> None:
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
        """Close the socket in a forked child: a copy would keep the template alive, which isn't the child's own."""
        if self.current is not None:
            self.current.sock.close()
        self.__init__()  # type: ignore[misc]


_forks = _Forks()
os.register_at_fork(after_in_child=_forks.forget)

"""The start of workers as forks of a template process, which all executors and keepers in this process share.

`worker/birth/template.py` is the template's program.

A fork starts in milliseconds and shares the template's memory. But some environment variables are read only when the
interpreter or a library starts. If a worker needs other values of these than the template has
(`find_early_variable`), the worker gets an interpreter of its own.
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

from colocate._system.ends import keep_exit_codes, wait_for_exit
from colocate._system.jobs import JobThread, Timer, report_exception
from colocate._system.limits import FORKS_WITHIN_S, TEMPLATE_IDLE_S
from colocate._system.readable import readable
from colocate.gpus import SHOWING
from colocate.worker.birth.template import ARGUMENTS_BYTES, MODE, REQUEST_BYTES, ROOM, ForkRequest, find_difference

THREAD = "colocate-template"

_ROOM_BYTES = 1 << 14
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

_TOO_EARLY = re.compile(
    f"(?!(?:{'|'.join(SHOWING)})$)(?:"  # Variables that are read only when GPUs are first used don't prevent a fork.
    # The loader, the C library and OpenSSL read these variables.
    "LD_|GLIBC_|MALLOC_|LANG$|LANGUAGE$|LC_|TZ$|OPENSSL_|SSL_"
    "|PYTHON|COVERAGE_|COV_CORE_"  # Python, and modules that are imported at the start, read these variables.
    "|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|GOTO_|BLIS_|NPY_|NUMPY_|NUMEXPR_"  # Numerical libraries read these variables.
    # Tensordict reads these variables.
    "|TD_|EXCLUDE_TD_|DISPATCH_TDNN|LIST_TO_STACK$|CAPTURE_NONTENSOR_STACK$|LAZY_LEGACY_OP$"
    # Torch and libraries below torch read these variables.
    "|CUDA_|CUBLAS_|CUDNN_|NVIDIA_|HIP_|ROCR_|HSA_|PYTORCH_|ATEN_|C10_|KINETO_"
    # TORCHINDUCTOR_CACHE_DIR doesn't prevent a fork, because each compilation reads the variable anew.
    "|TORCH(?!INDUCTOR_CACHE_DIR$)"
    ")"
)

_logger = logging.getLogger("colocate")


class NoFork(Exception):
    """Raised if a worker can't be a fork, and needs a separate interpreter. The message has the reason."""


class Fork:
    """A child process of this process: a worker or the template.

    Attributes:
        is_over: Whether the process is known to have ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_over = False
        self._exitcode: int | None = None

    def wait_for_exit(self) -> int | None:
        """Wait until the process has ended. Return the exit code, or the negative signal number; None if unknown."""
        if not self.is_over:
            self._exitcode = wait_for_exit(self.pid)
            self.is_over = True
        return self._exitcode

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if not self.is_over:
            os.kill(self.pid, signal.SIGKILL)


def wrap_process(process: subprocess.Popen[bytes]) -> Fork:
    """Return a handle for a process that `subprocess` has started.

    `subprocess` guesses an exit code that other code has collected. The handle doesn't guess.
    """
    process.returncode = 0  # This keeps `subprocess` from waiting, because the process may outlive the Popen object.
    return Fork(process.pid)


def find_early_variable(env: Mapping[str, str], base: Mapping[str, str]) -> str | None:
    """Return the name of the first environment variable that a fork would apply too late; None if there is none.

    Args:
        env: The worker's environment.
        base: The environment of the template's start.
    """
    return find_difference(env, base, _TOO_EARLY)


def hold_template(base: Mapping[str, str]) -> None:
    """Start a template in the background if there is none, and keep the template until a matching `release_template`.

    Args:
        base: The default environment of workers.
    """
    _forks.hold_template(dict(base))


def prepare_template(base: Mapping[str, str]) -> None:
    """Start a template for a later `hold_template`. Without that call, the template ends after an idle timeout."""
    hold_template(base)
    release_template()


def release_template() -> None:
    """Release the template after a call of `hold_template`."""
    _forks.release_template()


def fork_worker(
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
        env: All environment variables of the worker.
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
    if (name := find_early_variable(env, base)) is not None:
        raise NoFork(f"env has {name}, which is read when an interpreter or a library starts")
    # The kernel shows the umask in this file. `os.umask` can't read the umask without changing it.
    with open("/proc/self/status") as file:
        umask = int(file.read().partition("Umask:")[2].split()[0], 8)
    data = pickle.dumps(
        ForkRequest(
            tuple(arguments),
            dict(env),
            tuple(imports),
            umask,
            {limit: resource.getrlimit(limit) for limit in _LIMITS},
            frozenset(os.sched_getaffinity(0)),
        )
    )
    if len(data) > REQUEST_BYTES // 2:  # Half of the limit is left for the kernel's own data.
        raise NoFork("its environment is too long")
    return _forks.get_template(dict(base)).request_fork(data, sock, output)


def is_template_descriptor(number: int) -> bool:
    """Return whether a descriptor is the socket that connects this process with the template."""
    return (template := _forks.current) is not None and template.sock.fileno() == number


class _Template:
    def __init__(self, base: Mapping[str, str]) -> None:
        """Start the template on the current thread. The template and all forks end with this thread."""
        self.base = base
        self.sock, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        env = {**base, "OPENBLAS_NUM_THREADS": "1"}  # OpenBLAS would otherwise start threads during the import.
        room = _ROOM_BYTES + 2 * sum(len(name) + len(value) + 2 for name, value in env.items())
        command = [sys.executable, "-P", "-m", "colocate.worker", MODE, str(os.getpid()), str(theirs.fileno())]
        keep_exit_codes()
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
        self._process = wrap_process(process)

    def request_fork(self, data: bytes, sock: socket.socket, output: int) -> Fork:
        """Request a fork from the template, on any thread."""
        answer, theirs = os.pipe()
        try:
            try:
                folder = os.open(".", os.O_PATH)  # With O_PATH the call succeeds even if the folder has been removed.
                try:
                    socket.send_fds(self.sock, [data], [output, sock.fileno(), theirs, folder])
                finally:
                    os.close(folder)
            finally:
                os.close(theirs)
            if not readable(answer, FORKS_WITHIN_S):
                self.end_process()
                raise NoFork(f"the template hasn't answered for {FORKS_WITHIN_S:g} s, and was ended")
            pid, _, why = os.read(answer, 4096).decode(errors="replace").partition(" ")
        except OSError as error:
            self.end_process()
            raise NoFork(f"the template can't be asked: {error}") from None
        finally:
            os.close(answer)
        if not pid:
            self.end_process()
            raise NoFork("the template has ended meanwhile")
        worker = Fork(int(pid))
        if why:
            if worker.pid:
                worker.wait_for_exit()
            raise NoFork(f"the template can't: {why}")
        return worker

    @property
    def has_ended(self) -> bool:
        """Whether the template has ended.

        A template sends nothing, so a readable socket means that the process has ended.
        """
        return self.sock.fileno() < 0 or readable(self.sock.fileno(), 0)

    def end_process(self) -> None:
        """Kill the template and wait for the exit. The forks of the template continue."""
        self.sock.close()
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait_for_exit()


class _Forks:
    def __init__(self) -> None:
        self.current: _Template | None = None
        self._holders = 0
        self._end_timer: Timer | None = None
        self._lock = threading.Lock()
        self._thread = JobThread(THREAD, lambda error: report_exception())

    def hold_template(self, base: dict[str, str]) -> None:
        self._thread.start()  # The thread starts before `_holders` changes, so that an error leaves nothing to undo.
        with self._lock:
            self._holders += 1
            if self._end_timer is not None:
                self._end_timer.cancel()

        def warm() -> None:
            with contextlib.suppress(NoFork):  # The next call that needs a worker reports the error.
                self._ensure_template(base)

        self._thread.call_soon(warm)

    def release_template(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._end_timer = self._thread.call_later(TEMPLATE_IDLE_S, self._end_unneeded)

    def get_template(self, base: dict[str, str]) -> _Template:
        templates: list[_Template] = []
        self._thread.run(lambda: templates.append(self._ensure_template(base)))
        return templates[0]

    # -- on the thread whose end is the template's

    def _end_unneeded(self) -> None:
        with self._lock:
            needed = self._holders
        if not needed and self.current is not None:
            self.current.end_process()
            self.current = None

    def _ensure_template(self, base: dict[str, str]) -> _Template:
        present = self.current
        if present is not None and not present.has_ended and find_early_variable(base, present.base) is None:
            return present
        if present is not None:
            present.end_process()
        self.current = None
        try:
            self.current = _Template(base)
        except (OSError, ValueError) as error:
            raise NoFork(f"no template can be started: {error}") from None
        return self.current

    def reset_after_fork(self) -> None:
        """Close the socket in a forked child, where the open copy would keep the template alive."""
        if self.current is not None:
            self.current.sock.close()
        self.__init__()  # type: ignore[misc]


_forks = _Forks()
os.register_at_fork(after_in_child=_forks.reset_after_fork)

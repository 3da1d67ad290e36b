"""Run the `colocate` command, or a script, in a process that is forked after the usual imports.

From its first line to its exit handlers the fork behaves like a process that a shell starts. Variables that an
interpreter reads at its start come from the forking process: a test that sets such a variable starts a new process. The
template of the driver's workers is a fork, too, so that torch isn't imported again for each driver.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from colocate.keeper import forks
from colocate.worker.birth.template import ARGUMENTS_BYTES, MODE, ROOM, collapse_pages

_ROOT = Path(__file__).parents[1]
_IMPORTED = (
    *(
        "colocate_run.cli.check",
        "colocate_run.cli.doctor",
        "colocate_run.cli.plugin",
        "colocate_run.cli.run",
    ),
    *("colocate._api.runtime", "colocate_run.config.structure", "colocate_report.page", "jinja2", "rich.table"),
    *("colocate_local.plugin", "colocate_local.processes", "colocate_local.threads", "colocate.worker.birth.main"),
    "pydantic.types",  # typer imports this module, where typer is installed
)
_IMPORTED_FOR = {  # each import takes seconds
    "doctor": ("torch", "ray", "colocate_dask.executor", "mlflow", "wandb"),
    "session.py": ("torch._dynamo", "torch.distributed.tensor", "transformers"),
    "example.py": ("torch",),
    "ppo": ("colocate_ppo.team",),
    "plan": ("torch._dynamo", "torch.distributed.tensor", "transformers", "colocate_run.cli.plan"),
}
_ROOM_BYTES = 1 << 16
# A library for parallel computation starts threads at its import, and a fork would lack these threads.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # as `colocate plan` sets before torch is imported


class Forks:
    """The process that forks commands and scripts on request."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.forked", str(theirs.fileno()), " " * 2 * ARGUMENTS_BYTES],
            cwd=_ROOT,
            env={**os.environ, **_ONE_THREAD, **_QUIET, ROOM: " " * _ROOM_BYTES},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def close(self) -> None:
        """Close the connection, and wait until the process has exited."""
        self._socket.close()
        self._process.wait()

    def run(
        self,
        args: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        script: Path | None = None,
        strict: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run the command, or a script, to its end. If `strict`, Python's warnings are errors."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            status = _ask(self._socket, args, folder, environment, script, strict, [out.fileno(), err.fileno()])
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess(list(args), status, *texts)


def beside(args: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the command from a forked script, with stdout and stderr as one text."""
    assert _beside is not None
    with tempfile.TemporaryFile() as out:
        status = _ask(_beside, args, Path.cwd(), os.environ, None, True, [out.fileno()] * 2)
        out.seek(0)
        return subprocess.CompletedProcess(list(args), status, out.read().decode(errors="replace"))


_beside: socket.socket | None = None


def _ask(
    connection: socket.socket,
    args: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    script: Path | None,
    strict: bool,
    files: Sequence[int],
) -> int:
    asked = {"args": args, "folder": str(folder), "environment": dict(environment), "strict": strict}
    told = json.dumps({**asked, "script": None if script is None else str(script)}).encode()
    socket.send_fds(connection, [told], files)
    status: int = json.loads(connection.recv(64))
    return status


def _serve(number: int) -> dict[str, Any]:
    """Fork a process for each request, and report its exit code. Only a fork returns, with its request."""
    global _beside
    for name in _IMPORTED:
        importlib.import_module(name)
    sys.modules["tests.forked"] = sys.modules["__main__"]  # for scripts that are forked
    asking = {number: socket.socket(fileno=number)}
    running: dict[int, tuple[int, socket.socket]] = {}
    modules = 0
    while True:
        ready = select.select([*asking, *running], [], [])[0][0]
        if ready in running:
            child, connection = running.pop(ready)
            os.close(ready)
            _, status = os.waitpid(child, 0)
            connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        connection = asking[ready]
        asked, files, *_ = socket.recv_fds(connection, 1 << 20, 2)
        if not asked:
            if ready == number:
                os._exit(0)
            asking.pop(ready).close()
            continue
        told = dict(json.loads(asked))
        for word in (*told["args"], os.path.basename(told["script"] or "")):
            for name in _IMPORTED_FOR.get(word, ()):
                if importlib.util.find_spec(name.partition(".")[0]) is not None:
                    importlib.import_module(name)
        if modules != len(sys.modules):
            modules = len(sys.modules)
            gc.freeze()  # otherwise a fork's garbage collections would copy every page
            collapse_pages()  # otherwise each fork, template and worker would copy an entry for every page
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would be without the other threads"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child = os.fork()
        if child == 0:
            for other in (ours, *asking.values()):
                other.close()
            for other_pid in running:
                os.close(other_pid)
            for standard, file in enumerate(files, 1):
                os.dup2(file, standard)
                os.close(file)
            _beside = theirs
            return told
        theirs.close()
        for file in files:
            os.close(file)
        asking[ours.fileno()] = ours
        running[os.pidfd_open(child)] = child, connection


def _become(args: Sequence[str], folder: str, environment: Mapping[str, str], script: str | None, strict: bool) -> int:
    """Run as `python -m colocate`, or `python SCRIPT`, does in the folder; return the exit status."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # a cached value comes from another environment
    if script is not None or "run" in args:
        _Templates(environment)
    if not strict:
        _warn_only()
    first = folder if script is None else os.path.dirname(script)
    sys.path[:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [script or "colocate", *args]
    try:
        if script is None:
            runpy.run_module("colocate", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    else:
        return 0
    return 1


class _Templates:
    """The driver's first template: forked before the driver does anything, and started on request."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._asks, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._asks.close()
            _be_template(asked)
        asked.close()
        forks.subprocess = types.SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=self.start)  # type: ignore[attr-defined]

    def start(self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **other: Any) -> Any:
        """Run the command in the fork; start a new process if the fork is in use, or doesn't fit the environment."""
        with self._asks as sock:
            if (
                sock.fileno() < 0
                or forks.find_early_variable(env, {**self._environment, "OPENBLAS_NUM_THREADS": "1"}) is not None
            ):
                return subprocess.Popen(command, env=env, pass_fds=pass_fds, **other)
            socket.send_fds(sock, [json.dumps([command, dict(env)]).encode()], pass_fds)
        return types.SimpleNamespace(pid=self._pid)


def _be_template(asked: socket.socket) -> NoReturn:
    data, descriptors, *_ = socket.recv_fds(asked, 1 << 20, 1)
    if not data:
        os._exit(0)
    asked.close()
    command, env = json.loads(data)
    command[command.index(MODE) + 2] = str(descriptors[0])
    with open("/proc/self/stat", "rb") as file:  # the addresses of the process's command line
        start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
    line = b"".join(os.fsencode(word) + b"\0" for word in command)
    ctypes.memmove(start, line.ljust(end - start, b" ")[: end - start - 1] + b"\0", end - start)
    os.environ.clear()
    os.environ.update(env)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    os.setpgid(0, 0)
    sys.argv = ["", *command[command.index(MODE) :]]
    sys.path[:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    _warn_only()
    del sys.modules["colocate.worker.birth.main"]  # the template imports this module, and looks at the imports so far
    runpy.run_module("colocate.worker", run_name="__main__", alter_sys=True)
    raise AssertionError("a worker has ended without its end")


def _warn_only() -> None:
    sys.warnoptions.clear()
    warnings.filters.remove(("error", None, Warning, None, 0))  # type: ignore[attr-defined]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _end(status: int) -> NoReturn:
    """Exit as an interpreter does, without the half second in which all modules are freed."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _end(_become(**_serve(int(sys.argv[1]))))

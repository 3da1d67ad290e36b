"""The `colocate` command, or a script, in a process of its own, forked from one that has imported what these import.

From its first line to its exit handlers it is what a shell would start. What an interpreter takes from the environment
when it begins, it has from the process that forks: who gives it such variables starts a new one.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_ROOT = Path(__file__).parents[1]
_IMPORTED = (
    *(
        "colocate_run.cli.check",
        "colocate_run.cli.doctor",
        "colocate_run.cli.plugin",
        "colocate_run.cli.run",
    ),
    *("colocate._api.runtime", "colocate_run.config.structure", "colocate_report.page", "jinja2", "rich.table"),
    *("colocate_local.plugin", "colocate_local.processes", "colocate_local.threads"),
    "pydantic.types",  # typer does, where it is installed
)
_IMPORTED_FOR = {  # seconds each
    "doctor": ("torch", "ray", "colocate_dask.executor", "mlflow", "wandb"),
    "session.py": ("torch",),
    "example.py": ("torch",),
    "ppo": ("colocate_ppo.team",),
    "plan": ("torch._dynamo", "torch.distributed.tensor", "transformers", "colocate_run.cli.plan"),
}
# A library that computes in parallel starts threads when it is imported, which a fork would be without.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # as `colocate plan` sets before torch is imported


class Forks:
    """What forks them, one after the other."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.forked", str(theirs.fileno())],
            cwd=_ROOT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _ONE_THREAD | _QUIET,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.wait()

    def run(
        self, args: Sequence[str], folder: Path, environment: Mapping[str, str], script: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one to its end: the command, or a script."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            asked = {"args": args, "folder": str(folder), "environment": dict(environment)}
            told = json.dumps({**asked, "script": None if script is None else str(script)}).encode()
            socket.send_fds(self._socket, [told], [out.fileno(), err.fileno()])
            status = json.loads(self._socket.recv(64))
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess(list(args), status, *texts)


def _serve(number: int) -> dict[str, Any]:
    """Fork for each that is asked for, and tell how it ended. Comes back in the fork, with what to run."""
    for name in _IMPORTED:
        importlib.import_module(name)
    with socket.socket(fileno=number) as connection:
        while True:
            asked, files, *_ = socket.recv_fds(connection, 1 << 20, 2)
            if not asked:
                os._exit(0)
            told = dict(json.loads(asked))
            for word in (*told["args"], os.path.basename(told["script"] or "")):
                for name in _IMPORTED_FOR.get(word, ()):
                    if importlib.util.find_spec(name.partition(".")[0]) is not None:
                        importlib.import_module(name)
            gc.freeze()  # or a fork's collections would copy every page
            assert len(os.listdir("/proc/self/task")) == 1, "a fork would be without the other threads"
            child = os.fork()
            if child == 0:
                for standard, file in enumerate(files, 1):
                    os.dup2(file, standard)
                    os.close(file)
                return told
            for file in files:
                os.close(file)
            _, status = os.waitpid(child, 0)
            connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def _become(args: Sequence[str], folder: str, environment: Mapping[str, str], script: str | None) -> int:
    """Be what `python -m colocate`, or `python SCRIPT`, is there; its status."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
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


def _end(status: int) -> NoReturn:
    """As an interpreter ends, but that it doesn't take half a second to let go of all modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _end(_become(**_serve(int(sys.argv[1]))))

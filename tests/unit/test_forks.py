"""Workers as forks: which environment may be one, what a fork has of its starter, and what a template refuses."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import colocate
from colocate import Runtime
from colocate._plugins.needs import imports_of
from colocate.keeper import forks
from colocate.testing.forking import exit_code, fork
from colocate.testing.probes.born import Born
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import wait_until
from colocate.worker.birth.template import MODE, ROOM, Wanted

ROLES = {"born": colocate.role(Born)}


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with colocate.connect("local", processes=True) as runtime:
        yield runtime


@pytest.mark.parametrize(
    ("changed", "late"),
    [
        ({}, None),
        ({"COLOCATE_PROBE": "1", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "HF_HOME": "/models"}, None),
        ({"CUDA_VISIBLE_DEVICES": "1"}, None),
        ({"LD_PRELOAD": "libjemalloc.so"}, "LD_PRELOAD"),
        ({"OMP_NUM_THREADS": "3"}, "OMP_NUM_THREADS"),
        ({"CUDA_MODULE_LOADING": "EAGER"}, "CUDA_MODULE_LOADING"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTHONHASHSEED": "0"}, "PYTHONHASHSEED"),
        ({"MALLOC_ARENA_MAX": "1"}, "MALLOC_ARENA_MAX"),
        ({"LANG": "C"}, "LANG"),
        ({"LANGLEY": "x", "TZDATA": "x"}, None),
    ],
)
def test_which_environment_comes_too_late(changed: dict[str, str], late: str | None) -> None:
    """What the loader, Python, OpenMP and CUDA read before an import; removed is changed, too."""
    base = {"HOME": "/", "PATH": "/bin"}
    assert forks.differs({**base, **changed}, base) == late
    assert forks.differs(base, {**base, **changed}) == late


def _imports_when_called() -> type:
    class Trains(colocate.Role):
        """Imports where it needs it."""

        def __init__(self) -> None:
            from torch.nn import Linear

            self.layer = Linear(2, 2)

    return Trains


def _has_it_from_around() -> type:
    import torch

    def layer() -> torch.nn.Linear:
        return torch.nn.Linear(2, 2)

    class Trains(colocate.Role):
        """Has a function of the function around it."""

        @staticmethod
        def train() -> None:
            """Train."""
            layer()

    return Trains


def _needs_nothing() -> type:
    class Counts(colocate.Role):
        """Counts."""

        def count(self) -> int:
            """Count."""
            return self.ctx.rank

    return Counts


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (_imports_when_called, True),
        (_has_it_from_around, True),
        (_needs_nothing, False),
    ],
)
def test_what_roles_need(make: Callable[[], type], needs: bool) -> None:
    """It is foreseen from what a class's functions import, ask for and have from around them; not from a library's."""
    pytest.importorskip("torch")
    assert ("torch" in imports_of([make()])) == needs


def test_a_template_with_two_threads_refuses() -> None:
    """A fork would have one of them, and the locks of both; the worker is started by itself, and that is logged."""
    code = """if True:
        import sys, threading
        from colocate.worker.birth import template
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        sys.argv[1:] = sys.argv[2:]
        template.Template().run()
    """
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", code, "colocate.worker", MODE, str(os.getpid()), str(theirs.fileno()), ""]
    env = {**os.environ, ROOM: " " * 100}
    with ours, theirs, subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        template = object.__new__(forks._Template)
        template.base, template.sock, template.pid, template._gone = env, ours, process.pid, forks.Fork(process.pid)
        with pytest.raises(forks.NoFork, match="it has 2 threads, of which a fork would have one"):
            template.fork(pickle.dumps(Wanted((), {}, (), 0, {}, frozenset())), ours, 2)
        template.end()


def test_what_a_fork_has_of_its_starter(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder, umask, limits and CPUs as they are now, not as they were when the template was started."""
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mask, cpus = os.umask(0o27), os.sched_getaffinity(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        with runtime.reserve(1) as pool, pool.spawn(ROLES) as group:
            (facts,) = group.role("born", Born).process()
    finally:
        os.umask(mask)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (facts["folder"], facts["umask"], facts["limit"]) == (tmp_path.stat().st_ino, 0o27, (soft - 1, hard))
    assert facts["cpus"] == cpus
    assert facts["arguments"][2:4] == [str(os.getpid()), "serves"]


def test_the_threads_of_numpy_alone() -> None:
    """OpenBLAS has as many as the slot has CPUs, also in a fork of a template that has it with one, without torch."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("OpenBLAS has no more threads than there are CPUs")
    code = """if True:
        import colocate

        class Counts(colocate.Role):
            def __init__(self):
                import numpy

            @colocate.method
            def threads(self):
                import ctypes, sys
                with open("/proc/self/maps") as file:
                    paths = {line.split()[-1] for line in file if "openblas" in line}
                names = [f"{a}openblas_get_num_threads{b}" for a in ("", "scipy_") for b in ("", "64_", "_64")]
                getters = [getattr(ctypes.CDLL(path), name, None) for path in paths for name in names]
                return *{getter() for getter in getters if getter is not None}, "torch" in sys.modules

        with colocate.connect("local", processes=True) as runtime:
            for _ in range(3):
                with runtime.reserve(1, cpus=2) as pool, pool.spawn({"counts": colocate.role(Counts)}) as group:
                    print(group["counts"].threads())
    """
    done = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[(2, False)]\n" * 3, "")


def test_what_roles_have_imported(runtime: Runtime) -> None:
    """A role has imported torch in a call: the workers after it find that done."""
    with runtime.reserve(1) as pool:
        with pool.spawn(ROLES) as group:
            group.role("born", Born).threads()
        template = forks._forks.current
        assert template is not None
        maps = Path(f"/proc/{template.pid}/maps")
        wait_until(lambda: "libtorch" in maps.read_text(), "the template has imported torch")
        assert len(os.listdir(f"/proc/{template.pid}/task")) == 1


def test_one_that_does_not_answer(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that is stopped is ended, and its worker started by itself."""
    with runtime.reserve(1) as pool:
        pool.spawn({"echo": colocate.role(Echo)}).close()
        template = forks._forks.current
        assert template is not None
        monkeypatch.setattr(forks, "FORKS_WITHIN_S", 0.1)
        os.kill(template.pid, signal.SIGSTOP)
        pool.spawn({"echo": colocate.role(Echo)}).close()
        assert not psutil.pid_exists(template.pid)


def test_it_ends_when_nobody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while; who comes before that finds it."""
    monkeypatch.setattr(forks, "TEMPLATE_IDLE_S", 0.2)
    own = forks._Forks()
    own.hold(dict(os.environ))
    template = own.template(dict(os.environ))
    own.let_go()
    own.hold(dict(os.environ))
    assert own.template(dict(os.environ)) is template
    own.let_go()
    wait_until(lambda: own.current is None, "it has ended")
    assert not psutil.pid_exists(template.pid)  # and was waited for
    own._thread.close()


def test_a_driver_that_forks(runtime: Runtime) -> None:
    """The child has a template of its own, and leaves the parent's alone."""
    with runtime.reserve(1) as pool:
        pool.spawn({"echo": colocate.role(Echo)}).close()
    template = forks._forks.current
    assert template is not None
    child = fork()
    if not child:
        os._exit(0 if forks._forks.current is None and template.sock.fileno() < 0 else 1)
    assert exit_code(child) == 0
    assert not template.ended

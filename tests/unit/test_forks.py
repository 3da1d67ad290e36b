"""Workers as forks: early variables, what a fork has of its starter, and what a template refuses."""

from __future__ import annotations

import importlib
import mmap
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.forking import exit_code, fork

import colocate
from colocate import RoleSpec, Runtime
from colocate._system.libc import MADV_COLLAPSE
from colocate.keeper import forks
from colocate.testing.probes.born import Born
from colocate.testing.probes.plain import Echo
from colocate.worker.birth.template import MODE, ROOM, ForkRequest, collapse_pages

ROLES = {"born": colocate.role(Born)}


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with colocate.connect("local", processes=True) as runtime:
        yield runtime


@pytest.mark.parametrize(
    ("changed", "late"),
    [
        ({}, None),
        ({"COLOCATE_PROBE": "1", "NCCL_DEBUG": "INFO", "HF_HOME": "/models", "CUDA_VISIBLE_DEVICES": "1"}, None),
        ({"LD_PRELOAD": "libjemalloc.so"}, "LD_PRELOAD"),
        ({"OMP_NUM_THREADS": "3"}, "OMP_NUM_THREADS"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTHONHASHSEED": "0"}, "PYTHONHASHSEED"),
        ({"LANG": "C"}, "LANG"),
        ({"LANGLEY": "x", "TZDATA": "x", "TORCHINDUCTOR_CACHE_DIR": "/tmp/x"}, None),
    ],
)
def test_which_environment_comes_too_late(changed: dict[str, str], late: str | None) -> None:
    """A variable that the loader, Python, OpenMP or CUDA reads early, even a removed one, is too late for a fork."""
    base = {"HOME": "/", "PATH": "/bin"}
    assert forks.find_early_variable({**base, **changed}, base) == late
    assert forks.find_early_variable(base, {**base, **changed}) == late


def test_a_template_with_two_threads_refuses() -> None:
    """A template with two threads refuses a fork, which would have one of the threads and the locks of both."""
    code = """if True:
        import sys, threading
        from colocate.worker.birth import template
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        sys.argv[1:] = sys.argv[2:]
        template.Template().serve_forks()
    """
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", code, "colocate.worker", MODE, str(os.getpid()), str(theirs.fileno()), ""]
    env = {**os.environ, ROOM: " " * 100}
    with ours, theirs, subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        template = object.__new__(forks._Template)
        template.base, template.sock, template.pid, template._process = env, ours, process.pid, forks.Fork(process.pid)
        with pytest.raises(forks.NoFork, match="it has 2 threads, of which a fork would have one"):
            template.request_fork(pickle.dumps(ForkRequest((), {}, (), 0, {}, frozenset())), ours, 2)
        template.end_process()


@pytest.mark.parametrize("env", [{}, {"OMP_NUM_THREADS": "3"}], ids=["forked", "by itself"])
def test_unknown_exit_status_is_reported(runtime: Runtime, env: dict[str, str]) -> None:
    """A worker whose exit status the kernel drops, as SIGCHLD is ignored, is reported without an exit code."""
    with runtime.reserve(1, cpus=0, env=env) as pool:
        group = pool.spawn(ROLES)
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            with pytest.raises(colocate.WorkerDied, match="its exit code isn't known") as caught:
                group.run(lambda ctx: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            signal.signal(signal.SIGCHLD, before)
        assert (caught.value.exitcode, caught.value.signal) == (None, None)


def test_fork_inherits_starter_state(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has its starter's current folder, umask, limits and CPUs, not those at the template's start."""
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


def test_a_template_of_ones_own(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of the driver leaves the template alone; a stopped template is ended, and a worker starts without it."""
    with runtime.reserve(1) as pool:
        pool.spawn({"echo": colocate.role(Echo)}).close()
        template = forks._forks.current
        assert template is not None
        child = fork()
        if not child:
            os._exit(0 if forks._forks.current is None and template.sock.fileno() < 0 else 1)
        assert exit_code(child) == 0
        assert not template.has_ended
        monkeypatch.setattr(forks, "FORKS_WITHIN_S", 0.1)
        os.kill(template.pid, signal.SIGSTOP)
        pool.spawn({"echo": colocate.role(Echo)}).close()
        assert not psutil.pid_exists(template.pid)


def test_later_fork_reuses_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later fork has what others have imported, here to look up the version of a role's distribution."""
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # A new template: other tests' workers report other modules.

    class Looks(colocate.Role):
        def __init__(self) -> None:
            self.found = "email.parser" in sys.modules

        @colocate.method
        def look(self) -> bool:
            return self.found

    found: list[bool] = []
    beside: list[dict[str, RoleSpec[Any]]] = [{}, {"echo": colocate.role(Echo)}, {}]
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(1) as pool:
        for others in beside:
            with pool.spawn({"looks": colocate.role(Looks), **others}) as group:
                found += group.role("looks", Looks).look()
    assert found == [False, False, True]


@pytest.mark.long
def test_transformers_is_shared(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers after the first have its import of transformers, unless a variable that the import reads differs."""
    monkeypatch.setattr(forks, "FORKS_WITHIN_S", 240.0)  # The template's import takes up to a minute.

    class Looks(colocate.Role):
        def __init__(self) -> None:
            from colocate.worker.birth import template

            self.found = "transformers.modeling_utils" in sys.modules, template._writes is not None
            if self.found[1]:
                importlib.import_module("transformers.modeling_utils")

        @colocate.method
        def look(self) -> tuple[bool, bool]:
            return self.found

    pytest.importorskip("transformers")
    found: list[tuple[bool, bool]] = []
    with runtime.reserve(1) as pool:
        for env in ({}, {}, {"HF_HUB_OFFLINE": "1"}):
            with pool.spawn({"looks": colocate.role(Looks)}, env=env) as group:
                found += group.role("looks", Looks).look()
    assert found == [(False, True), (True, True), (False, False)]


def test_template_forks_without_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template whose folder is gone still forks, even when an import asks for the folder."""

    def tell(_: colocate.Context) -> bool:
        from colocate.worker.birth import template

        if template._writes is not None:
            os.write(template._writes, b"test.support.os_helper ")
        return template._writes is not None

    found: list[bool] = []
    if (before := forks._forks.current) is not None:
        before.end_process()
    (gone := tmp_path / "gone").mkdir()
    with monkeypatch.context() as there:
        there.chdir(gone)
        with colocate.connect("local", processes=True) as runtime, runtime.reserve(1) as pool:
            pool.spawn({"echo": colocate.role(Echo)}).close()
            there.undo()
            gone.rmdir()
            for _ in range(3):
                with pool.spawn({"echo": colocate.role(Echo)}) as group:
                    found += group.run(tell)
    assert found == [True, True, True]


@pytest.mark.long
def test_shared_fork_memory_uses_large_pages() -> None:
    """Memory that many forks share is in large pages, as each fork copies the entries of all pages."""
    child = fork()
    if not child:
        with mmap.mmap(-1, 1 << 23, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.write(b"x" * len(memory))
            try:
                memory.madvise(MADV_COLLAPSE, 0, 1 << 21)
            except OSError:  # This kernel can't collapse pages.
                os._exit(2)
            before = _large_kib()
            collapse_pages()
            os._exit(0 if _large_kib() - before >= 1 << 12 else 1)
    if (code := exit_code(child)) == 2:
        pytest.skip("this kernel makes no large pages of others (Linux 6.1 does)")
    assert code == 0


def _large_kib() -> int:
    told = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = [each for each in told if each.startswith("AnonHugePages:")]
    return int(line.split()[1])

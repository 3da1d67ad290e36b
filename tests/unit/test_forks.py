"""Workers as forks: which environment may be one, what a fork has of its starter, and what a template refuses."""

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
    """What the loader, Python, OpenMP and CUDA read before an import; removed is changed, too."""
    base = {"HOME": "/", "PATH": "/bin"}
    assert forks.find_early_variable({**base, **changed}, base) == late
    assert forks.find_early_variable(base, {**base, **changed}) == late


def test_a_template_with_two_threads_refuses() -> None:
    """A fork would have one of them, and the locks of both; the worker is started by itself, and that is logged."""
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
def test_an_end_that_nobody_knows(runtime: Runtime, env: dict[str, str]) -> None:
    """Of which the kernel keeps nothing, as SIGCHLD is ignored since: no exit code is told, and why."""
    with runtime.reserve(1, cpus=0, env=env) as pool:
        group = pool.spawn(ROLES)
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            with pytest.raises(colocate.WorkerDied, match="its exit code isn't known") as caught:
                group.run(lambda ctx: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            signal.signal(signal.SIGCHLD, before)
        assert (caught.value.exitcode, caught.value.signal) == (None, None)


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


def test_a_template_of_ones_own(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of the driver leaves it alone; one that is stopped is ended, and its worker started by itself."""
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


def test_what_forks_have_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones find it: here what looking up the version of a role's distribution takes, which a script's has not."""
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # with a template of its own: another test's workers have told others

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
    """By workers after the one that imported it, but by none whose environment has others of what that import reads."""
    monkeypatch.setattr(forks, "FORKS_WITHIN_S", 240.0)  # the template imports it: on a busy machine for a minute

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


def test_where_the_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which a template was started: it goes on, also where what it imports asks for that."""

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
def test_what_many_forks_share() -> None:
    """Is in large pages, as each fork copies the entries of all pages: here of eight megabytes, in a process's own."""
    child = fork()
    if not child:
        with mmap.mmap(-1, 1 << 23, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.write(b"x" * len(memory))
            try:
                memory.madvise(MADV_COLLAPSE, 0, 1 << 21)
            except OSError:  # this kernel doesn't make large pages of others
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

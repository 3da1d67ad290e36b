"""Leftovers of dead drivers on this machine are found, and processes of living drivers aren't among them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from colocate._plugins import strays
from colocate.testing.waiting import wait_until
from colocate.worker.birth import processes
from colocate.worker.birth.supervisor import MARK
from colocate_run.cli.cluster import Cluster, find_strays

# Waits for the end of its input; its arguments are on its command line, as a worker's are.
WAIT = "import sys; sys.stdin.read()"
FORK = "import os, sys; child = os.fork(); child and print(child, flush=True); sys.stdin.read()"


@contextmanager
def pretending(*words: str, code: str = WAIT) -> Iterator[subprocess.Popen[str]]:
    """Run a process with the given words on its command line."""
    command = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with process:
            wait_until(lambda: set(words) <= set(_words(process.pid)), "it has its command line")
            yield process
            process.kill()
    finally:
        process.kill()


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.fixture(scope="module")
def gone() -> int:
    """Return the pid of a process that has exited."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def worker(starter: int, label: str) -> list[str]:
    return ["-m", "colocate.worker", "3", str(starter), "waits", label]


def found(pid: int) -> list[str]:
    """Return the kinds of a process among the strays."""
    return [each.kind for each in strays.list_strays() if each.pid == pid]


def test_living_workers() -> None:
    """Workers with a living driver aren't strays, and neither are their forked children."""
    with pretending(*worker(os.getpid(), "ours"), code=FORK) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        seen = {each.pid: each.label for each in processes.list_workers() if each.pid in (process.pid, child)}
        assert seen == {process.pid: "ours", child: "ours"}
        assert found(process.pid) == found(child) == []


def test_orphaned_marked_process_is_stray(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with a worker's mark is a stray if the starter in the mark has exited."""
    for starter, kinds in ((gone, ["process of a role"]), (os.getpid(), [])):
        monkeypatch.setenv(MARK, f"{starter} here-{starter}-1/group/0")
        with pretending("its", "role's") as process:
            assert found(process.pid) == kinds


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no names here")
def test_named_memory() -> None:
    """Named shared memory under colocate's name is a stray until it is removed."""
    path = Path("/dev/shm") / f"colocate-{uuid.uuid4().hex}"
    path.touch()
    try:
        assert str(path) in {each.id for each in strays.list_strays()}
    finally:
        path.unlink()
    assert str(path) not in {each.id for each in strays.list_strays()}


def test_the_command(gone: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints each stray with name and start time, or JSON; the exit status is 1, or 0 without strays."""
    monkeypatch.setattr("colocate.features.looking.audit.AUDIT_SETTLES_S", 0.1)
    label = f"here-{gone}-1/pool#{uuid.uuid4().hex}"
    with pretending(*worker(gone, label)) as process:
        only: list[int] = [process.pid]
        monkeypatch.setattr(
            "colocate.driver.list_strays",
            lambda: [each for each in strays.list_strays() if each.pid in only],
        )
        assert find_strays(Cluster(), json=False) == 1
        title, line = capsys.readouterr().out.splitlines()
        assert title == "1 left on this machine"
        date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
        assert re.match(
            rf"leaked: worker process {re.escape(label)} \(pid {process.pid}, since {date}\): it is st", line
        )
        assert f"started by process {gone}" in line
        assert find_strays(Cluster(), json=True) == 1
        assert f'"pid": {process.pid}' in capsys.readouterr().out
        process.kill()
        process.wait()
        only.append(os.getpid())
        assert find_strays(Cluster(executor="local"), json=False) == 0
    assert capsys.readouterr().out == "clean: nothing has been left on this machine\n"


def test_mistakes_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown executor, an address without a cluster, and a change without a config are refused with reasons."""
    assert find_strays(Cluster(executor="lokal"), json=False) == 1
    assert "did you mean 'local'?" in capsys.readouterr().err
    assert find_strays(Cluster(executor="local", address="here"), json=False) == 1
    assert "executor 'local' has no cluster to join" in capsys.readouterr().err
    assert find_strays(Cluster(address="auto"), json=False) == 1
    assert "Say --executor dask, --executor ray" in capsys.readouterr().err
    assert find_strays(Cluster(changes=["executor=ray"]), json=False) == 1
    assert "name one" in capsys.readouterr().err

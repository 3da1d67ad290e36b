"""Leftovers of Ray on this machine are found if their driver is gone; a living private Ray isn't one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate.testing.waiting import wait_until
from colocate_ray.envoy import MARK
from colocate_ray.leftovers import SERVICE, find_leftovers
from colocate_ray.private import PREFIX

WAIT = "import sys; sys.stdin.read()"


@contextmanager
def pretending(*words: str, **env: str) -> Iterator[int]:
    """Start a process with the command line of a colocate process."""
    command = [sys.executable, "-c", WAIT, *words]
    with subprocess.Popen(command, env={**os.environ, **env}, stdin=subprocess.PIPE) as process:
        try:
            file = Path(f"/proc/{process.pid}/cmdline")
            wait_until(lambda: WAIT in file.read_text().split("\0"), "it has its command line")
            yield process.pid
        finally:
            process.kill()


@pytest.fixture(scope="module")
def gone() -> int:
    """Return the pid of an ended process."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def found(pid: int) -> list[str]:
    return [each.kind for each in find_leftovers() if each.pid == pid]


def test_envoy_without_driver_is_found(gone: int) -> None:
    with pretending("-m", SERVICE, "3", str(gone)) as pid:
        (stray,) = (each for each in find_leftovers() if each.pid == pid)
        assert stray.kind == "Ray envoy"
        assert f"on behalf of driver {gone}" in stray.detail
    with pretending("-m", SERVICE, "3", str(os.getpid())) as pid:
        assert found(pid) == []


def test_processes_without_envoy_are_found() -> None:
    """Processes without their envoy are found by their folder or by their mark; a janitor isn't one of them."""
    folder = f"{tempfile.gettempdir()}/{PREFIX}{uuid.uuid4().hex[:8]}"
    with pretending(f"--session-dir={folder}/r/session_1") as pid:
        (stray,) = (each for each in find_leftovers() if each.pid == pid)
        assert stray.kind == "process of an envoy"
        assert f"its folder is {folder}" in stray.detail
    with pretending("anything", **{MARK: "abc"}) as pid:
        assert found(pid) == ["process of an envoy"]
    with pretending("janitor.py", folder) as pid:
        assert found(pid) == []


def test_unused_folder_is_found() -> None:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        assert str(folder) in {each.id for each in find_leftovers()}
        with pretending("janitor.py", str(folder)):
            assert str(folder) not in {each.id for each in find_leftovers()}
    finally:
        folder.rmdir()


@pytest.mark.long
def test_living_private_ray() -> None:
    """A private Ray isn't a leftover while it runs, and leaves none."""
    before = {each.id for each in find_leftovers()}
    with colocate.connect("ray", cpus=1) as runtime, runtime.reserve(1):
        executor: Any = runtime._node.services.executor
        pids = {each.pid for each in executor.running()}
        assert pids
        assert Path(executor._envoy.folder).is_dir()
        assert [each for each in find_leftovers() if each.id not in before] == []
    assert [each for each in find_leftovers() if each.id not in before] == []

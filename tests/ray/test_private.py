"""Private Rays: each belongs to one driver, and ends with it, however the driver ends."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ray.deaths import death_of

import colocate
from colocate import ColocatedGroup, Runtime, gpus
from colocate.errors import ClusterError, ColocateError
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import Processes, wait_until
from colocate_ray.leftovers import find_leftovers

SCRIPT = """
import json, os, sys
import colocate
from colocate.testing.probes.plain import Echo

def say(what):
    print(json.dumps(what), flush=True)
"""
CONNECTED = """
runtime = colocate.connect("ray", cpus=2)
group = runtime.reserve(2).spawn({"echo": colocate.role(Echo)})
say(runtime._node.services.executor._envoy.folder)
"""


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with colocate.connect("ray", cpus=2) as runtime:
        yield runtime


def driver(text: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(text)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def below(process: subprocess.Popen[str]) -> Processes:
    return Processes(child.pid for child in psutil.Process(process.pid).children(recursive=True))


def hear(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def envoy(runtime: Runtime) -> Any:
    executor: Any = runtime._node.services.executor
    return executor._envoy


def test_clean_end(tmp_path: Path) -> None:
    """A private Ray leaves no process, file or output, and ignores the shell's settings for other clusters.

    While it runs, none of its parts is a leftover, and each rank has its own GPU of the job's, even if Ray is told to
    leave GPUs to others.
    """
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, "HOME": str(home), "RAY_ADDRESS": "127.0.0.1:1", "RAY_AUTH_MODE": "disabled"}
    env |= {gpus.VARIABLE: "5, 3,-1,7", f"RAY_EXPERIMENTAL_NOSET_{gpus.VARIABLE}": "1"}
    process = driver(
        """
        from colocate import gpus
        gpus.machine_gpus = lambda: ()
        runtime = colocate.connect("ray", cpus=2, gpus=2)
        assert not [name for name in sys.modules if name.partition(".")[0] == "ray"]
        pool = runtime.reserve(2, gpus=1)
        echo = pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        assert echo.echo(1) == [1, 1]
        say(runtime._node.services.executor._envoy.folder)
        say([[slot.devices for slot in pool.slots], echo.env(gpus.VARIABLE)])
        sys.stdin.readline()
        runtime.close()
        """,
        env=env,
        stderr=subprocess.PIPE,
    )
    with process:
        folder = Path(hear(process))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
        assert hear(process) == [[[0], [1]], ["5", "3"]]
        ours = {str(folder), *(str(each.pid) for each in psutil.Process(process.pid).children(recursive=True))}
        assert not ours & {text for each in find_leftovers() for text in (each.id, str(each.pid))}
        processes = below(process)
        printed = process.communicate("\n", timeout=60)
        assert not [line for text in printed for line in text.splitlines() if not line.startswith("[colocate] ")]
        assert process.returncode == 0
    processes.wait_all()
    processes.release_all()
    assert not folder.exists()
    assert list(home.iterdir()) == []


@pytest.mark.long
def test_killed_driver() -> None:
    """A killed driver leaves nothing of its private Ray, even if a forked child of the driver lives on."""
    fork = "child = os.fork()\nif child == 0:\n    sys.stdin.read(); os._exit(0)\n"
    with driver(CONNECTED + fork + "say(child)\nsys.stdin.read()") as process:
        folder = Path(hear(process))
        child = psutil.Process(hear(process))
        family = psutil.Process(process.pid)
        processes = Processes(each.pid for each in family.children(recursive=True) if each != child)
        process.kill()
        processes.wait_all()
        processes.release_all()
        wait_until(lambda: not folder.exists(), "the folder is gone")
        assert child.is_running()


@pytest.mark.long
def test_driver_killed_during_start_leaves_no_process() -> None:
    """A driver that is killed while its private Ray starts leaves no process."""
    with driver("colocate.connect('ray')") as process:
        wait_until(lambda: len(psutil.Process(process.pid).children(recursive=True)) > 2, "Ray is being started")
        processes = below(process)
        process.kill()
        processes.wait_all()
        processes.release_all()


@pytest.mark.long
def test_private_ray_refuses_other_driver(runtime: Runtime) -> None:
    """A private Ray refuses another driver on this machine, which has no token."""
    with pytest.raises(ConnectionError, match="refuses this driver's token"):
        colocate.connect("ray", address=_address(runtime))


def _address(runtime: Runtime) -> str:
    raylets = [p for p in psutil.Process(envoy(runtime)._process.pid).children() if p.name() == "raylet"]
    return next(a.partition("=")[2] for a in raylets[0].cmdline() if a.startswith("--gcs-address="))


@pytest.mark.long
def test_another_one(runtime: Runtime) -> None:
    """A second private Ray in one driver is separate: its loss doesn't affect the first."""
    other = colocate.connect("ray", cpus=1)
    assert [node.cpus for node in other._node.services.executor.nodes()] == [1]
    assert [node.cpus for node in runtime._node.services.executor.nodes()] == [2]
    with runtime.reserve(2, timeout=0) as pool:
        ours = pool.spawn({"echo": colocate.role(Echo)})
        theirs = other.reserve(1, timeout=0).spawn({"echo": colocate.role(Echo)})
        assert theirs.role("echo", Echo).echo(1) == [1]
        _lose_the_envoy(other, theirs)
        assert ours.role("echo", Echo).echo(1) == [1, 1]


def _lose_the_envoy(runtime: Runtime, group: ColocatedGroup) -> None:
    """Kill a runtime's envoy, and check that its group fails and that closing still ends everything."""
    process = psutil.Process(envoy(runtime)._process.pid)
    processes = Processes(child.pid for child in process.children(recursive=True))
    process.kill()
    assert death_of(group).rank == 0
    with pytest.raises(ColocateError, match="the connection to Ray has ended"):
        runtime.reserve(1)
    runtime.close()
    processes.wait_all()
    processes.release_all()
    assert not Path(envoy(runtime).folder).exists()


@pytest.mark.long
def test_one_that_does_not_start(tmp_path: Path) -> None:
    """The error of a private Ray that can't start has the last lines of Ray's logs, which the run keeps."""
    (tmp_path / "noop.py").write_text("def job(run): ...\n")
    (tmp_path / "demo.yaml").write_text(
        "executor: {use: ray, with: {cpus: 1}}\npools: {main: {slots: 1}}\njob: noop:job\n"
    )
    command = f"mount -t tmpfs -o ro tmpfs /dev/shm && exec {sys.executable} -m colocate run demo.yaml"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    assert done.returncode == 1
    assert "error: a private Ray could not be started: The current node timed out during startup." in done.stderr
    assert re.search(r"raylet\.err: .* failed to open file /dev/shm/plasma\S+ *errorRead-only", done.stderr)
    kept = (tmp_path / "runs" / "demo" / "engine-raylet.err").read_text()
    assert "StackTrace" in kept


@pytest.mark.long
def test_envoy_exit_during_start_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A private Ray whose envoy ends during the start raises ClusterError with Ray's logs, and leaves no files."""

    others = psutil.Process().children()

    def kill() -> None:
        logs = "*/r/session_latest/logs/gcs_server.out"
        wait_until(lambda: any(each.stat().st_size for each in Path(parent).glob(logs)), "Ray logs")
        started = [each for each in psutil.Process().children() if each not in others]
        (service,) = (each for each in started if "colocate_ray.service" in each.cmdline())
        service.kill()

    # Below tmp_path the names of Ray's sockets would be too long.
    with tempfile.TemporaryDirectory(dir="/tmp") as parent, ThreadPoolExecutor() as threads:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        killing = threads.submit(kill)
        with pytest.raises(ClusterError, match="the process that was in it ended with code -9") as caught:
            colocate.connect("ray", cpus=1)
        killing.result()
        assert not [*Path(parent).iterdir()]
    assert caught.value.logs is not None
    assert "gcs_server.out" in caught.value.logs


def test_not_installed() -> None:
    """Without Ray installed, the error has the line that installs it."""
    text = """
    sys.modules["ray"] = None
    try:
        colocate.connect("ray")
    except colocate.PluginError as error:
        say(error.hint)
    """
    with driver(text) as process:
        assert hear(process).startswith("pip install 'ray>=")


@pytest.mark.long
def test_hidden_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A private Ray counts no GPU if CUDA's variable hides all; Ray itself would count one."""
    monkeypatch.setattr(gpus, "machine_gpus", lambda: ("",))
    monkeypatch.setenv(gpus.VARIABLE, "-1")
    with colocate.connect("ray", cpus=1) as runtime:
        assert [node.gpus for node in runtime._node.services.executor.nodes()] == [0]

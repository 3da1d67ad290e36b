"""A proxy process beside the driver: it answers calls, sends notifications, and ends with the driver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colocate.errors import ClusterError, ColocateError, ConfigError
from colocate.testing.waiting import Processes, send_signal, wait_until
from colocate_ray import proxy
from colocate_ray.proxy import DriverProxy

WAIT_S = 60.0
SIDE = """
import os, threading
from colocate.errors import ConfigError
from colocate_ray.proxy import ProxyProcess

class Side(ProxyProcess):
    engine = "Toy"

    def open(self, left):
        self.left = left
        if left is None:
            raise ConfigError("no file is given")
        self.main = threading.current_thread() is threading.main_thread()

    def add(self, one, other):
        self.notify_driver("adding", one, other)
        return one + other

    def opened_on_main(self):
        return self.main

    def fail(self):
        raise OSError("the engine's own")

    def hang(self):
        threading.Event().wait()

    def exit(self):
        print("these are its last words", flush=True)
        os._exit(3)

    def leave(self):
        with open(self.left, "w") as file:
            file.write("left")

if __name__ == "__main__":
    Side.serve()
"""


class Toy:
    """A proxy of that module, with its notifications."""

    def __init__(self, folder: Path) -> None:
        self.left = folder / "left"
        self.heard: list[Any] = []
        self.proxy = DriverProxy("toy_side", engine="Toy", heard=lambda *what: self.heard.append(what))


@pytest.fixture
def toy(no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    (tmp_path / "toy_side.py").write_text(SIDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    toy = Toy(tmp_path)
    yield toy
    toy.proxy.close()


def test_proxy_calls_and_delivers_notifications(toy: Toy) -> None:
    """A proxy calls methods by name, delivers notifications before the next answer, and calls `leave` at its end.

    An engine's error, and the error of a missing method, arrive as text.
    """
    assert toy.proxy.open(str(toy.left), within_s=WAIT_S)
    assert toy.proxy.call("add", 1, 2, within_s=WAIT_S) == 3
    assert toy.heard == [("adding", 1, 2)]
    assert toy.proxy.call("opened_on_main", within_s=WAIT_S) is True
    posted = [toy.proxy.call_soon("add", number, 1) for number in range(3)]
    assert toy.proxy.wait_for(posted)
    assert [each.result() for each in posted] == [[1], [2], [3]]
    with pytest.raises(ColocateError, match="Toy failed: OSError: the engine's own"):
        toy.proxy.call("fail", within_s=WAIT_S)
    with pytest.raises(ColocateError, match=r"Toy failed: AttributeError: .*'subtract'"):
        toy.proxy.call("subtract", within_s=WAIT_S)
    with pytest.raises(ColocateError, match="Toy hasn't done within 0 s"):
        toy.proxy.call("hang", within_s=0)
    toy.proxy.close()
    assert toy.left.read_text() == "left"


def test_one_that_does_not_open(toy: Toy) -> None:
    """A proxy whose `open` fails raises its error, and the process ends."""
    with Processes([toy.proxy.pid]) as process:
        with pytest.raises(ConfigError, match="no file is given"):
            toy.proxy.open(None, within_s=WAIT_S)
        process.wait_all()


def test_one_that_ends(toy: Toy, tmp_path: Path) -> None:
    """A call during which the process ends fails with its exit code and last words, and so do later calls.

    The folder of its processes still exists when the error is made, and is deleted when the error is raised.
    """
    folder = tmp_path / "started"
    folder.mkdir()
    (folder / "log").write_text("out of memory")

    class Logged(DriverProxy):
        def make_lost_error(self, why: str) -> ClusterError:
            return ClusterError(why, logs={"log": (folder / "log").read_text()})

    with contextlib.closing(Logged("toy_side", engine="Toy", folder=str(folder))) as logged:
        assert logged.open(str(toy.left), within_s=WAIT_S)
        for _ in range(2):
            with pytest.raises(ClusterError, match=r"ended with code 3(.|\n)*these are its last words") as caught:
                logged.call("exit", within_s=WAIT_S)
            assert caught.value.logs == {"log": "out of memory"}
            assert not folder.exists()


def test_one_that_is_stopped(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to a proxy process that doesn't answer pings fails: the connection is given up."""
    monkeypatch.setattr(proxy, "SILENCE_S", 0.1)
    monkeypatch.setattr(proxy, "_PONG_WITHIN_S", 0.1)
    assert toy.proxy.open(str(toy.left), within_s=WAIT_S)
    send_signal(toy.proxy.pid, signal.SIGSTOP)
    with pytest.raises(ClusterError, match="the connection to Toy has ended"):
        toy.proxy.call("add", 1, 2, within_s=WAIT_S)


@pytest.mark.parametrize("stopped", [False, True])
def test_proxy_ends_with_driver(toy: Toy, tmp_path: Path, stopped: bool) -> None:
    """The proxy process ends when its driver is killed; if it is stopped, its janitor kills it."""
    script = f"""
        from colocate_ray.proxy import DriverProxy
        proxy = DriverProxy("toy_side", engine="Toy")
        assert proxy.open({str(tmp_path / "other")!r}, within_s={WAIT_S})
        print(proxy.pid, flush=True)
        input()
        """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        with Processes([pid]) as process:
            if stopped:
                send_signal(pid, signal.SIGSTOP)
            driver.kill()
            process.wait_all()
    wait_until(lambda: stopped or (tmp_path / "other").exists(), "it has left")

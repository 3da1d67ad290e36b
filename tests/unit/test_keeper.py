"""A keeper and its driver in one process: whatever one of them does, the other one ends."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest

from colocate import wire
from colocate._protocol.from_worker import Address, Hello
from colocate._protocol.message import Message, decode_head
from colocate._protocol.to_worker import Listen
from colocate.executor import Boot, Exit, Host
from colocate.keeper import Keeper, Keepers, KeptSlot, Patience
from colocate.testing.waiting import wait_until

WAIT_S = 20


class Heard:
    """Records what a worker sends its driver, and its exit."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.lines: list[str] = []
        self.exits: queue.SimpleQueue[Exit] = queue.SimpleQueue()

    def hello(self) -> Mapping[str, Any]:
        """Return the facts of the worker's first message."""
        hello = self.messages.get(timeout=WAIT_S)
        assert isinstance(hello, Hello)
        return hello.facts

    def received(self, head: tuple[Any, ...], body: Any) -> None:
        self.messages.put(decode_head(head))

    def logged(self, line: str) -> None:
        self.lines.append(line)

    def exited(self, exit: Exit) -> None:
        self.exits.put(exit)


@pytest.fixture
def keepers(no_leaks: None) -> Iterator[Keepers]:
    keepers = Keepers("test")
    yield keepers
    keepers.close()


class KeeperPair:
    """A keeper, and the driver's slot on it."""

    def __init__(self, keepers: Keepers, **options: Any) -> None:
        self.ended = threading.Event()
        self.stuck = threading.Event()
        self.keeper = Keeper(keepers.key, on_end=self.ended.set, **options)
        self.address = self.keeper.address.rpartition(",")[2]  # With a host the address is for other machines.
        self.slot: KeptSlot = keepers.open_slot(self.address, on_stuck=self.stuck.set)

    def launch(self, **boot: Any) -> tuple[Host, Heard]:
        heard = Heard()
        return self.slot.launch(Boot("w", "g", 0, "here", **boot), heard), heard


@pytest.fixture
def kept(keepers: Keepers) -> Iterator[KeeperPair]:
    kept = KeeperPair(keepers)
    yield kept
    kept.keeper.close()


def test_worker_dies_before_reading_keeper_message(keepers: Keepers) -> None:
    """A worker that dies before it reads a message of its keeper's has an ordinary exit."""
    kept = KeeperPair(keepers, env={}, detachable=True)
    _host, heard = kept.launch()
    pid = heard.hello()["pid"]
    (worker,) = kept.keeper._workers.values()
    os.kill(pid, signal.SIGSTOP)
    worker.cut_lane()
    os.kill(pid, signal.SIGKILL)
    assert heard.exits.get(timeout=WAIT_S).signal == "SIGKILL"
    kept.keeper.close()


def test_launch_without_listening_keeper_fails(keepers: Keepers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    stuck = threading.Event()
    heard = Heard()
    slot = keepers.open_slot(f"tcp:127.0.0.1:{port}", on_stuck=stuck.set)
    slot.launch(Boot("w", "g", 0, "here"), heard)
    assert "its keeper is gone: nobody listens" in str(heard.exits.get(timeout=WAIT_S).detail)
    assert stuck.wait(WAIT_S)


def test_a_keeper_that_answers_nothing_is_reported(keepers: Keepers) -> None:
    """A silent keeper, as a stopped process is, is reported to the engine before its worker's exit."""
    keepers.patience = Patience(kill_s=0.05)
    event_loop = wire.EventLoop("silent")
    listener = wire.listen("unix")
    held: list[socket.socket] = []
    event_loop.listen(listener, keepers.key, held.append)
    stuck, ended = threading.Event(), threading.Event()
    heard = Heard()

    def end() -> None:
        stuck.set()
        ended.wait(WAIT_S)

    slot = keepers.open_slot(listener.address, on_stuck=end)
    host = slot.launch(Boot("w", "g", 0, "here"), heard)
    wait_until(lambda: len(held) == 2, "both connections")
    host.kill()
    assert stuck.wait(WAIT_S)
    # The receiver of the exit releases the slot: the engine must be notified before.
    passed = threading.Event()
    keepers.event_loop.call_later(0.0, passed.set)
    assert passed.wait(WAIT_S)
    assert heard.exits.empty()
    ended.set()
    assert heard.exits.get(timeout=WAIT_S).detail == "it was killed, which its keeper hasn't confirmed"
    for sock in held:
        sock.close()
    event_loop.close()


def test_a_stranger_and_a_second_driver_are_turned_away(kept: KeeperPair, keepers: Keepers) -> None:
    _host, heard = kept.launch()
    heard.messages.get(timeout=WAIT_S)
    stranger = Keepers("stranger")
    other = Heard()
    stranger.open_slot(kept.keeper.address).launch(Boot("x", "g", 0, "here"), other)
    assert "the keys differ" in str(other.exits.get(timeout=WAIT_S).detail)
    stranger.close()
    second = Heard()
    keepers.open_slot(kept.keeper.address).launch(Boot("y", "g", 0, "here"), second)
    assert second.exits.get(timeout=WAIT_S).detail is not None
    assert [one.id for one in keepers.running()] == ["w"]
    assert not kept.ended.is_set()


def test_unknown_processes_are_listed(kept: KeeperPair, keepers: Keepers) -> None:
    """A process that runs under a keeper's name is listed, even if the keeper doesn't know it."""
    assert keepers.running() == []
    words = ["-m", "colocate.worker", "3", str(os.getpid()), "waits", kept.keeper.label]
    with subprocess.Popen([sys.executable, "-c", "input()", *words], stdin=subprocess.PIPE) as process:
        try:
            wait_until(lambda: [one.pid for one in keepers.running()] == [process.pid], "it is listed")
            (found,) = keepers.running()
            assert (found.kind, found.id, found.doubt) == ("worker", f"process {process.pid}", "")
        finally:
            process.kill()
    assert keepers.running() == []


def test_a_keeper_that_does_not_answer(kept: KeeperPair, keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list comes in time although a keeper doesn't answer, with its expected workers and the doubt."""
    _host, heard = kept.launch()
    heard.messages.get(timeout=WAIT_S)
    monkeypatch.setattr("colocate.keeper.slots.LISTED_WITHIN_S", 0.05)
    begun, go_on = threading.Event(), threading.Event()

    def stick() -> None:
        begun.set()
        go_on.wait(WAIT_S)

    kept.keeper._launcher.call_soon(stick)
    assert begun.wait(WAIT_S)
    try:
        (found,) = keepers.running()
    finally:
        go_on.set()
    assert (found.id, found.doubt) == ("w", "its keeper hasn't answered within 0.05 s")
    assert kept.slot._requests._open == {}
    monkeypatch.setattr("colocate.keeper.slots.LISTED_WITHIN_S", WAIT_S)
    (found,) = keepers.running()
    assert (found.id, found.doubt) == ("w", "")
    assert found.pid is not None


def test_encrypted(keepers: Keepers, cluster: wire.Tls) -> None:
    """A worker has its own TLS with the driver: the keeper passes the connection on and closes its ends."""
    keepers.tls = cluster
    kept = KeeperPair(keepers, host="127.0.0.1", tls=cluster)
    host, heard = kept.launch()
    with wire.encode(Listen().head()) as frame:
        host.send(frame)
    assert heard.hello()["pid"] != os.getpid()
    assert isinstance(address := heard.messages.get(timeout=WAIT_S), Address)
    assert str(address.address).startswith("unix:")  # The boot says that all processes are on this machine.

    def connections() -> int:
        return sum(each.status == "ESTABLISHED" for each in psutil.Process().net_connections("tcp"))

    wait_until(lambda: connections() == 3, "left are both ends of the commands, and the driver's of the lane")
    host.kill()
    assert heard.exits.get(timeout=WAIT_S) == Exit(signal="SIGKILL")
    kept.keeper.close()

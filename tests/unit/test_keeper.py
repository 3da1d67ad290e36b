"""A keeper and its driver, in one process: whatever one of them does, the other one comes to an end."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import psutil
import pytest

from colocate import wire
from colocate._protocol.commands import Detach
from colocate._protocol.from_worker import Address, Hello
from colocate._protocol.message import Message, read
from colocate._protocol.to_worker import Listen
from colocate.executor import Boot, Exit, Host
from colocate.keeper import Keeper, Keepers, KeptSlot, Lease, Patience, Registration, listed
from colocate.keeper.forks import NoFork
from colocate.keeper.keeper import _StartedWorker
from colocate.testing.waiting import starter_of, wait_until

WAIT_S = 20


class Heard:
    """What a driver hears of a worker."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.lines: list[str] = []
        self.exits: queue.SimpleQueue[Exit] = queue.SimpleQueue()

    def hello(self) -> Mapping[str, Any]:
        """What it says of itself first."""
        hello = self.messages.get(timeout=WAIT_S)
        assert isinstance(hello, Hello)
        return hello.facts

    def received(self, head: tuple[Any, ...], body: Any) -> None:
        self.messages.put(read(head))

    def logged(self, line: str) -> None:
        self.lines.append(line)

    def exited(self, exit: Exit) -> None:
        self.exits.put(exit)


@pytest.fixture
def keepers(no_leaks: None) -> Iterator[Keepers]:
    keepers = Keepers("test")
    yield keepers
    keepers.close()


class Kept:
    """A keeper, and its slot as the driver sees it."""

    def __init__(self, keepers: Keepers, **options: Any) -> None:
        self.ended = threading.Event()
        self.stuck = threading.Event()
        self.keeper = Keeper(keepers.key, on_end=self.ended.set, **options)
        self.address = self.keeper.address.rpartition(",")[2]  # with a host: as other machines reach it
        self.slot: KeptSlot = keepers.slot(self.address, on_stuck=self.stuck.set)

    def launch(self, **boot: Any) -> tuple[Host, Heard]:
        heard = Heard()
        return self.slot.launch(Boot("w", "g", 0, "here", **boot), heard), heard


@pytest.fixture
def kept(keepers: Keepers) -> Iterator[Kept]:
    kept = Kept(keepers)
    yield kept
    kept.keeper.close()


def test_a_worker_comes_and_goes(kept: Kept, keepers: Keepers) -> None:
    host, heard = kept.launch()
    hello = heard.hello()
    assert starter_of(hello["pid"]) == os.getpid()
    assert [one.id for one in keepers.running()] == ["w"]
    host.kill()
    assert heard.exits.get(timeout=WAIT_S) == Exit(signal="SIGKILL")
    assert keepers.running() == []
    host.kill()  # harmless


def test_what_is_sent_before_there_is_a_lane_arrives(kept: Kept) -> None:
    host, heard = kept.launch()
    with wire.encode(Listen().head()) as frame:
        host.send(frame)
    assert [type(heard.messages.get(timeout=WAIT_S)) for _ in range(2)] == [Hello, Address]


def test_killed_before_it_has_its_process(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that was to be its own is waited for, though the worker is forgotten by then."""
    given: queue.SimpleQueue[int] = queue.SimpleQueue()
    killed = threading.Event()
    hand_over = _StartedWorker.hand_over

    def late(worker: _StartedWorker, *what: Any, **more: Any) -> None:
        assert worker.process is not None
        given.put(worker.process.pid)
        killed.wait(WAIT_S)
        hand_over(worker, *what, **more)

    monkeypatch.setattr(_StartedWorker, "hand_over", late)
    host, heard = kept.launch()
    pid = given.get(timeout=WAIT_S)
    host.kill()
    heard.exits.get(timeout=WAIT_S)
    killed.set()
    kept.keeper.close()
    assert not psutil.pid_exists(pid)


def test_the_driver_lets_go(kept: Kept) -> None:
    _host, heard = kept.launch()
    pid = heard.hello()["pid"]
    kept.slot.close()
    assert kept.ended.wait(WAIT_S)
    assert not psutil.pid_exists(pid)
    assert heard.exits.get(timeout=WAIT_S).detail == "its keeper was let go"


def test_the_keeper_goes(kept: Kept) -> None:
    _host, heard = kept.launch()
    heard.messages.get(timeout=WAIT_S)
    kept.keeper.close()
    exit = heard.exits.get(timeout=WAIT_S)
    assert exit.signal == "SIGKILL" or str(exit.detail).startswith("its keeper is gone: ")


def test_the_engine_says_that_the_keeper_is_gone(kept: Kept) -> None:
    _host, heard = kept.launch()
    heard.messages.get(timeout=WAIT_S)
    kept.slot.lost("the node has left")
    assert heard.exits.get(timeout=WAIT_S).detail == "the node has left"


def test_nobody_listens(keepers: Keepers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    stuck = threading.Event()
    heard = Heard()
    slot = keepers.slot(f"tcp:127.0.0.1:{port}", on_stuck=stuck.set)
    slot.launch(Boot("w", "g", 0, "here"), heard)
    assert "its keeper is gone: nobody listens" in str(heard.exits.get(timeout=WAIT_S).detail)
    assert stuck.wait(WAIT_S)


def test_a_keeper_that_answers_nothing_is_reported(keepers: Keepers) -> None:
    """It accepts and stays silent, as a stopped process would: the kill isn't confirmed, and the engine is asked."""
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

    slot = keepers.slot(listener.address, on_stuck=end)
    host = slot.launch(Boot("w", "g", 0, "here"), heard)
    wait_until(lambda: len(held) == 2, "both connections")
    host.kill()
    assert stuck.wait(WAIT_S)
    # Whoever hears of the exit gives the slot back: the engine has to have been told before.
    passed = threading.Event()
    keepers.event_loop.later(0.0, passed.set)
    assert passed.wait(WAIT_S)
    assert heard.exits.empty()
    ended.set()
    assert heard.exits.get(timeout=WAIT_S).detail == "it was killed, which its keeper hasn't confirmed"
    for sock in held:
        sock.close()
    event_loop.close()


def test_where_a_keeper_listens(keepers: Keepers) -> None:
    """At a port of a range, on another address than the one that is dialled; when none is free, that is said."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"no port of {port}-{port} is free on 127\.0\.0\.1 for a keeper of a pool"):
            Keeper(keepers.key, host="127.0.0.1", ports=(port, port))
    kept = Kept(keepers, host="localhost", bind="0.0.0.0", ports=(port, port))
    assert kept.address == f"tcp:localhost:{port}"
    _host, heard = kept.launch()
    heard.hello()
    kept.keeper.close()


def test_how_long_a_machine_may_be_silent(keepers: Keepers) -> None:
    """Both sides say when a connection is cut; where nothing is said it is after 8 s."""
    kept = Kept(keepers, host="127.0.0.1", cut_s=20)
    assert kept.slot.wait_connected() is None
    wait_until(lambda: kept.keeper._driver, "the keeper has its driver")
    lanes: list[Any] = [kept.slot._commands, kept.keeper._driver]
    silent_ms = [lane._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for lane in lanes]
    assert silent_ms == [8000, 20000]
    kept.keeper.close()


def test_a_stranger_and_a_second_driver_are_turned_away(kept: Kept, keepers: Keepers) -> None:
    _host, heard = kept.launch()
    heard.messages.get(timeout=WAIT_S)
    stranger = Keepers("stranger")
    other = Heard()
    stranger.slot(kept.keeper.address).launch(Boot("x", "g", 0, "here"), other)
    assert "the keys differ" in str(other.exits.get(timeout=WAIT_S).detail)
    stranger.close()
    second = Heard()
    keepers.slot(kept.keeper.address).launch(Boot("y", "g", 0, "here"), second)
    assert second.exits.get(timeout=WAIT_S).detail is not None
    assert [one.id for one in keepers.running()] == ["w"]
    assert not kept.ended.is_set()


def test_processes_that_nobody_knows_are_listed(kept: Kept, keepers: Keepers) -> None:
    """What runs below a keeper under its name is told, also what the keeper has lost sight of; its template isn't."""
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


def test_a_keeper_that_does_not_answer(kept: Kept, keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list comes in time all the same: with the workers that ought to be there, and that doubt."""
    _host, heard = kept.launch()
    heard.messages.get(timeout=WAIT_S)
    monkeypatch.setattr("colocate.keeper.slots.LISTED_WITHIN_S", 0.05)
    begun, go_on = threading.Event(), threading.Event()

    def stick() -> None:
        begun.set()
        go_on.wait(WAIT_S)

    kept.keeper._launcher.soon(stick)
    assert begun.wait(WAIT_S)
    try:
        (found,) = keepers.running()
    finally:
        go_on.set()
    assert (found.id, found.doubt) == ("w", "its keeper hasn't answered within 0.05 s")
    assert kept.slot._requests._open == {}
    monkeypatch.undo()
    (found,) = keepers.running()
    assert (found.id, found.doubt) == ("w", "")
    assert found.pid is not None


def test_nobody_dials(keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocate.keeper.keeper.DIALLED_WITHIN_S", 0.05)
    ended = threading.Event()
    keeper = Keeper(keepers.key, on_end=ended.set)
    assert ended.wait(WAIT_S)
    keeper.close()


def test_from_other_machines(keepers: Keepers) -> None:
    """With a host it listens there too; what is on this machine takes the shorter way."""
    kept = Kept(keepers, host="127.0.0.1")
    unix, tcp = kept.keeper.address.split(",")
    assert unix.startswith("unix:")
    assert tcp.startswith("tcp:127.0.0.1:")
    heard = Heard()
    far = Keepers("far")
    far.key = keepers.key
    kept.slot.close()
    assert kept.ended.wait(WAIT_S)
    alone = Keeper(far.key, host="127.0.0.1")
    far.slot(alone.address.split(",")[1]).launch(Boot("z", "g", 0, "here"), heard)
    assert heard.hello()
    far.close()
    alone.close()
    kept.keeper.close()


def test_encrypted(keepers: Keepers, cluster: wire.Tls) -> None:
    """A worker has TLS of its own with the driver: its keeper hands the connection on, and sees nothing of it."""
    keepers.tls = cluster
    kept = Kept(keepers, host="127.0.0.1", tls=cluster)
    host, heard = kept.launch()
    with wire.encode(Listen().head()) as frame:
        host.send(frame)
    assert heard.hello()["pid"] != os.getpid()
    assert isinstance(address := heard.messages.get(timeout=WAIT_S), Address)
    assert str(address.address).startswith("unix:")  # the boot says that all of it is on this machine

    def connections() -> int:
        return sum(each.status == "ESTABLISHED" for each in psutil.Process().net_connections("tcp"))

    wait_until(lambda: connections() == 3, "left are both ends of the commands, and the driver's of the lane")
    host.kill()
    assert heard.exits.get(timeout=WAIT_S) == Exit(signal="SIGKILL")
    kept.keeper.close()


def test_a_worker_that_cannot_be_started(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    host, heard = kept.launch()
    heard.messages.get(timeout=WAIT_S)
    host.kill()
    heard.exits.get(timeout=WAIT_S)

    def no_fork(*args: Any, **options: Any) -> Any:
        raise NoFork("it can't")

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("colocate.keeper.process.fork", no_fork)
    monkeypatch.setattr("colocate.keeper.process.subprocess.Popen", fail)
    _host, heard = kept.launch()
    exit = heard.exits.get(timeout=WAIT_S)
    assert exit.detail == "it could not be started: OSError: [Errno 12] Cannot allocate memory"


@pytest.mark.parametrize("own", [True, False])
def test_an_environment_that_cannot_be(keepers: Keepers, own: bool) -> None:
    """A worker whose environment, or whose keeper's, has an impossible variable ends with that; others start."""
    impossible = {"A=B": "C"}
    kept = Kept(keepers, env={} if own else impossible)
    _host, heard = kept.launch(env=impossible if own else {})
    assert str(heard.exits.get(timeout=WAIT_S).detail).startswith("it could not be started: ValueError")
    if own:
        _host, heard = kept.launch()
        assert heard.hello()
    kept.keeper.close()


def test_what_is_detached_is_listed(keepers: Keepers) -> None:
    """Whoever answers, as he says; who doesn't, as known; who is gone, or has detached nothing, not at all."""
    keepers.patience = Patience(dial_s=0.2)
    kept, not_detached = (Kept(keepers, detachable=True) for _ in range(2))
    assert kept.slot.wait_connected() is None
    about = {"slots": 1}
    lease = Lease("one", 300.0, frozenset(), about=about)
    assert kept.slot.confirm(partial(Detach, lease=lease), within_s=WAIT_S)
    with closing(wire.listen()) as silent:
        there = {
            "one": kept.keeper.address,
            "two": not_detached.keeper.address,
            "three": silent.address,
            "four": "unix:@nobody",
        }
        one, three = listed(keepers, [Registration(name, at, keepers.key, about=about) for name, at in there.items()])
    assert (one["name"], one["answers"], one["epoch"], one["slots"]) == ("one", True, 1, 1)
    assert (three["name"], three["answers"], three["epoch"], three["slots"]) == ("three", False, None, 1)
    assert one.keys() == three.keys()
    kept.keeper.close()
    not_detached.keeper.close()


def test_output_before_and_after_the_lane(kept: Kept) -> None:
    """All lines come, and before the end is told."""
    host, heard = kept.launch(env={"PYTHONVERBOSE": "1"})
    heard.messages.get(timeout=WAIT_S)
    host.kill()
    heard.exits.get(timeout=WAIT_S)
    assert any("import" in line for line in heard.lines)


def test_the_drivers_thread_ends(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers are told as lost, with the reason, and the keeper ends them as those of a driver that is gone."""
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    keepers = Keepers("test")
    kept = Kept(keepers)
    _host, heard = kept.launch()
    pid = heard.hello()["pid"]

    def fail() -> None:
        raise SystemExit("on purpose")

    keepers.event_loop.later(0.0, fail)
    assert heard.exits.get(timeout=WAIT_S).detail == "thread 'colocate-test' was ended by SystemExit: on purpose"
    assert kept.ended.wait(WAIT_S)
    assert not psutil.pid_exists(pid)
    keepers.close()


def test_the_keepers_thread_ends(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its workers, and itself."""
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    _host, heard = kept.launch()
    heard.messages.get(timeout=WAIT_S)

    def fail() -> None:
        raise SystemExit("on purpose")

    kept.keeper.event_loop.later(0.0, fail)
    assert kept.ended.wait(WAIT_S)
    heard.exits.get(timeout=WAIT_S)


def test_an_end_without_a_thread(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper whose driver has let go ends as soon as a thread is to be had for that."""
    start, refused = threading.Thread.start, threading.Event()

    def scarce(thread: threading.Thread) -> None:
        if thread.name == "colocate-keeper-end" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    kept.slot.close()
    assert kept.ended.wait(WAIT_S)
    assert refused.is_set()

"""A stranger that floods a listener with connections: who knows the key gets in all the same."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pytest

from colocate import wire
from colocate.testing.waiting import wait_until
from colocate.wire import Tls, connect, event_loop, hello, listen, new_key
from colocate.wire.event_loop import Kind
from colocate.wire.hello import TurnedAway, dial, until_let_in

KEY = new_key()
WAIT_S = 20
DELAY_S = 0.02
Way: TypeAlias = tuple[Kind, Tls | None]


@pytest.fixture(params=["unix", "tcp", "tls"])
def way(request: pytest.FixtureRequest) -> Way:
    """How a listener is reached."""
    if request.param == "tls":
        return "tcp", request.getfixturevalue("cluster")
    return request.param, None


between_machines = pytest.mark.parametrize("way", ["tcp", "tls"], indirect=True)


class Server:
    """An event loop that takes every authenticated connection, and holds it.

    Attributes:
        open_address: The same for strangers, who know nothing of TLS.
    """

    def __init__(self, way: Way) -> None:
        self.taken: list[socket.socket] = []
        self.tls = way[1]
        listening = listen(way[0], tls=self.tls)
        self.address = listening.address
        self.open_address = self.address.replace("tls:", "tcp:")
        self.event_loop = wire.EventLoop("test")
        self.event_loop.listen(listening, KEY, self.taken.append)

    def __enter__(self) -> Server:
        return self

    def connect(self, timeout: float = WAIT_S) -> socket.socket:
        return connect(self.address, KEY, timeout, self.tls)

    def __exit__(self, *_: object) -> None:
        assert self.event_loop.close(WAIT_S)
        for sock in self.taken:
            sock.close()


class Far:
    """An address that leads to another, with each byte so much later: a machine that is far away."""

    def __init__(self, address: str) -> None:
        kind, host, port = address.split(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = f"{kind}:127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._socks: list[socket.socket] = []
        self._late: deque[tuple[float, Callable[[], None]]] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Far:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self._selector.close()
        for sock in (self._listener, *self._socks):
            sock.close()

    def _serve(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(0.002):
                key.data()
            while self._late and self._late[0][0] <= time.monotonic():
                self._late.popleft()[1]()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        self._socks += near, far
        for one, other in ((near, far), (far, near)):
            self._selector.register(one, selectors.EVENT_READ, lambda one=one, other=other: self._carry(one, other))

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        try:
            data = one.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(one)
        self._late.append((time.monotonic() + DELAY_S, lambda: self._deliver(other, data)))

    def _deliver(self, other: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it has gone
            other.sendall(data) if data else other.shutdown(socket.SHUT_WR)


class Flood:
    """A stranger that dials as fast as it can, and says nothing.

    Attributes:
        dialled: How many connections it has made.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._dial)
        self.dialled = 0

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)

    def _dial(self) -> None:
        held: deque[socket.socket] = deque()
        while not self._stop.is_set():
            held.append(dial(self._address, WAIT_S))
            self.dialled += 1
            if len(held) > 1500:
                held.popleft().close()
        for sock in held:
            sock.close()


@between_machines
def test_a_flooding_stranger_displaces_nobody_who_knows_the_key(way: Way) -> None:
    """224 connections from 20 ms away, while one stranger dials as fast as it can: all of them get in."""
    with Server(way) as server, Far(server.address) as far, Flood(server.open_address) as flood:
        while flood.dialled < 2 * event_loop._MOST_STRANGERS:  # it is full of them
            time.sleep(0.001)
        with ThreadPoolExecutor(16) as threads:
            connected = list(threads.map(lambda _: connect(far.address, KEY, tls=server.tls), range(224)))
        before = flood.dialled
        while flood.dialled < before + 64:  # it goes on
            time.sleep(0.001)
        for number, sock in enumerate(connected):
            sock.sendall(number.to_bytes(4, "big"))
        # Who connects is let in by the last thing that it says: the server may not have taken that yet.
        wait_until(lambda: len(server.taken) >= len(connected), "the server has taken all of them")
        heard = set()
        for sock in server.taken:
            sock.settimeout(WAIT_S)
            heard.add(int.from_bytes(sock.recv(4), "big"))
        assert heard == set(range(224))
        for sock in connected:
            sock.close()


def test_strangers_hold_up_nobody(way: Way) -> None:
    """Who says nothing is displaced by others who say nothing."""
    with Server(way) as server, contextlib.ExitStack() as crowd:
        for _ in range(3 * event_loop._MOST_STRANGERS):
            crowd.enter_context(dial(server.open_address, WAIT_S))
        server.connect().close()


def test_who_is_turned_away_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its time is over; then the error says why."""
    attempts = iter([TurnedAway("flooded"), TurnedAway("flooded"), None])

    def attempt(_left: object) -> str:
        if error := next(attempts):
            raise error
        return "let in"

    assert until_let_in(attempt, WAIT_S) == "let in"
    attempts = iter([TurnedAway("flooded")])
    monkeypatch.setattr(hello, "_AGAIN_S", 4 * WAIT_S)  # there is no time for another attempt
    with pytest.raises(TimeoutError, match="flooded, until the time was over"):
        until_let_in(attempt, WAIT_S)

"""Only a peer that knows the key can connect, and no stranger holds up the others."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from colocate.wire import EventLoop, connect, event_loop as listener_module, hello as hello_module, listen, new_key
from colocate.wire.event_loop import Kind
from colocate.wire.hello import GREETING, WELCOME, dial

KEY, OTHER = new_key(), new_key()
KINDS: list[Kind] = ["unix", "tcp"]
WAIT_S = 20  # The limit for events that should come at once.


class Server:
    """An event loop that puts every authenticated connection into a queue."""

    def __init__(self, kind: Kind) -> None:
        self.accepted: queue.Queue[socket.socket] = queue.Queue()
        listener = listen(kind)
        self.address = listener.address
        self.event_loop = EventLoop("test")
        self.event_loop.listen(listener, KEY, self.accepted.put)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.event_loop.close(WAIT_S)

    def works(self) -> bool:
        with connect(self.address, KEY) as there, self.accepted.get(timeout=WAIT_S) as here:
            there.sendall(b"hello")
            here.settimeout(WAIT_S)
            return here.recv(5) == b"hello"


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param) as server:
        yield server


def is_turned_away(sock: socket.socket) -> bool:
    """Return True when the peer closes; raise `TimeoutError` if it stays."""
    sock.settimeout(WAIT_S)
    try:
        while sock.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


def test_another_key_is_refused_and_says_so(server: Server) -> None:
    with pytest.raises(ConnectionRefusedError, match="the keys differ"):
        connect(server.address, OTHER)
    assert server.accepted.empty()
    assert server.works()


@pytest.mark.parametrize("kind", KINDS)
def test_listener_without_the_key_is_refused(kind: Kind) -> None:
    """A listener that reflects the dialler's proof is refused, and never sees the key."""
    listener = listen(kind)
    seen = bytearray()

    def impostor() -> None:
        listener._sock.settimeout(WAIT_S)
        sock, _ = listener._sock.accept()
        with sock:
            sock.settimeout(WAIT_S)
            sock.sendall(GREETING + bytes(32))
            while len(seen) < 64:
                seen.extend(sock.recv(64))
            sock.sendall(WELCOME + seen[32:])  # The impostor reflects the dialler's own proof.

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(ConnectionRefusedError, match="doesn't know the key"):
        connect(listener.address, KEY)
    thread.join()
    listener.close()
    assert KEY not in seen


@pytest.mark.parametrize(
    "garbage",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\x80\x05cos\nsystem\n." * 100],
    ids=["nothing", "http", "zeros", "a pickle"],
)
def test_unauthenticated_bytes_are_never_unpickled(
    server: Server, garbage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled a stranger's bytes")

    monkeypatch.setattr("pickle.loads", never)
    with dial(server.address, WAIT_S) as stranger:
        try:
            stranger.sendall(garbage)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert server.works()
        if len(garbage) >= 64:
            assert is_turned_away(stranger)
    assert server.works()
    assert server.accepted.empty()


def test_a_replayed_proof_is_worthless(server: Server) -> None:
    """The bytes of a successful handshake don't work a second time: the listener's nonce is new."""
    said = bytearray()
    with dial(server.address, WAIT_S) as sock:
        spy = Spy(sock, said)
        hello_module.prove(spy, server.address, KEY, WAIT_S)  # type: ignore[arg-type]
        server.accepted.get(timeout=WAIT_S).close()
    with dial(server.address, WAIT_S) as sock:
        sock.sendall(said)
        assert is_turned_away(sock)
    assert server.accepted.empty()


class Spy:
    def __init__(self, sock: socket.socket, said: bytearray) -> None:
        self._sock, self._said = sock, said

    def sendall(self, data: bytes) -> None:
        self._said += data
        self._sock.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_a_silent_stranger_is_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_S", 0.05)
    with Server("unix") as server, dial(server.address, WAIT_S) as first, dial(server.address, WAIT_S) as second:
        assert is_turned_away(first)
        assert is_turned_away(second)
        assert server.works()


def test_another_users_process_is_not_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server("unix") as server:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with dial(server.address, WAIT_S) as stranger:
            assert stranger.recv(1) == b""
        with pytest.raises(ConnectionRefusedError, match="another user's"):
            connect(server.address, KEY)
        monkeypatch.undo()
        assert server.works()


@pytest.mark.parametrize("kind", KINDS)
def test_a_listener_that_never_answers(kind: Kind) -> None:
    late = pytest.raises(TimeoutError, match="accepted the connection but didn't answer in time")
    with closing(listen(kind)) as listener, late:
        connect(listener.address, KEY, timeout=0.05)

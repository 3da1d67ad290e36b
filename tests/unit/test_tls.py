"""TLS: what goes in comes out, encrypted in between, and only for those whom the cluster's authority has signed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import pytest
from tests.unit.conftest import certificates
from tests.unit.lanes import End, tls_pair

from colocate.testing.waiting import becomes_true, wait_until
from colocate.wire import (
    Hub,
    SocketLane,
    Tls,
    auth,
    connect,
    listen,
    listen_widely,
    new_key,
    pack,
    track_socket,
    unpack,
)
from colocate.wire.auth import dial
from colocate.wire.framing import encode
from colocate.wire.handshake import SecureHandshake
from colocate.wire.tls import Secured

KEY = new_key()
WAIT_S = 20


def _discard(_sent: bool) -> None:
    """What an echo doesn't need to know."""


class Server:
    """Listens for a cluster, and sends back what it receives. Its last listener's address is that of TLS."""

    def __init__(self, tls: Tls) -> None:
        self.hub = Hub("server")
        self.listeners = listen_widely("127.0.0.1", tls)
        self.lanes: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for listener in self.listeners:
            self.hub.listen(listener, KEY, self._accepted)
        self.address = self.listeners[-1].address

    def _accepted(self, sock: socket.socket) -> None:
        lane = self.hub.attach(sock, lambda head, body: _discard(lane.send(head, body)), lambda reason: None)


@pytest.fixture
def server(cluster: Tls) -> Iterator[Server]:
    server = Server(cluster)
    yield server
    server.hub.close()


def test_what_goes_in_comes_out(server: Server, cluster: Tls) -> None:
    assert server.address.startswith("tls:127.0.0.1:")
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    hub = Hub("client")
    lane = hub.attach(
        connect(server.address, KEY, tls=cluster), lambda head, body: got.put(unpack(body)), lambda reason: None
    )
    values = [b"small", bytes(range(256)) * (1 << 14), b""]
    for value in values:
        lane.send(("echo",), pack(value))
    assert [hashlib.sha256(got.get(timeout=WAIT_S)).digest() for _ in values] == [  # type: ignore[arg-type]
        hashlib.sha256(value).digest() for value in values
    ]
    hub.close()


def test_nothing_is_readable_on_the_way(cluster: Tls) -> None:
    """A wiretap between the two finds none of what they say."""
    server = Server(cluster)
    port = int(server.address.rpartition(":")[2])
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as tap:
        carriers: list[threading.Thread] = []

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):  # one of them has ended
                while data := source.recv(1 << 16):
                    heard.extend(data)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def bridge() -> None:
            near, _ = tap.accept()
            far = socket.create_connection(("127.0.0.1", port))
            with near, far:
                carriers.extend(threading.Thread(target=carry, args=pair) for pair in ((near, far), (far, near)))
                for carrier in carriers:
                    carrier.start()
                for carrier in carriers:
                    carrier.join()

        thread = threading.Thread(target=bridge)
        thread.start()
        got: queue.SimpleQueue[object] = queue.SimpleQueue()
        hub = Hub("client")
        sock = connect(f"tls:127.0.0.1:{tap.getsockname()[1]}", KEY, tls=cluster)
        lane = hub.attach(sock, lambda head, body: got.put(unpack(body)), lambda reason: None)
        with encode(("echo",), pack("a secret that is said")) as frame:
            lane.send(frame)
        assert got.get(timeout=WAIT_S) == "a secret that is said"
        hub.close()
        thread.join()
    server.hub.close()
    assert len(heard) > 100
    assert b"a secret" not in heard


def test_a_stranger_is_not_let_in(server: Server, stranger: Tls) -> None:
    with pytest.raises(ConnectionRefusedError, match="isn't trusted"):
        connect(server.address, KEY, tls=stranger)


def test_one_who_trusts_all_but_proves_nothing(server: Server) -> None:
    """Who has heard a knock can replay it: without a certificate that opens nothing."""
    # TLS 1.3 tells a client that it is refused only with the first bytes after the handshake.
    with (
        raw(server) as sock,
        without_certificate().wrap_socket(sock) as secured,
        contextlib.suppress(ConnectionResetError),
        pytest.raises(ssl.SSLError, match="certificate required"),
    ):
        secured.recv(1)


def test_who_has_not_knocked_is_shown_no_certificate(server: Server) -> None:
    with raw(server, knocks=False) as sock, pytest.raises((ssl.SSLEOFError, ConnectionResetError)):
        without_certificate().wrap_socket(sock)


def without_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@contextlib.contextmanager
def raw(server: Server, knocks: bool = True) -> Iterator[socket.socket]:
    """What goes to a listener without TLS."""
    with dial(server.address.replace("tls:", "tcp:"), WAIT_S) as sock:
        if knocks:
            auth._knock(sock, server.address, KEY, time.monotonic() + WAIT_S)
        yield sock


def test_a_certificate_that_is_larger_than_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener goes on when there is room again."""
    large = certificates(f"{'long.' * 40}{number}.test" for number in range(300))
    assert len(large.certificate) > 1 << 16

    def narrow(sock: socket.socket) -> socket.socket:
        if sock.family != socket.AF_UNIX:
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, buffer, 4096)
        return track_socket(sock)

    monkeypatch.setattr(auth, "track_socket", narrow)
    waited: list[int] = []
    advance = SecureHandshake.advance

    def seen(handshake: SecureHandshake) -> bool:
        try:
            return advance(handshake)
        finally:
            waited.append(handshake.waits_for)

    monkeypatch.setattr(SecureHandshake, "advance", seen)
    server = Server(large)
    with raw(server) as sock, Secured(sock, large.context(server=False), server=False) as secured:
        secured._open()  # it says hello, and doesn't read yet
        wait_until(lambda: select.EPOLLOUT in waited, "the listener has no room")
        secured.set_up(time.monotonic() + WAIT_S)
    server.hub.close()


def test_the_secret_of_one_connection(hub: Hub, cluster: Tls) -> None:
    """Who has a certificate, but not what both sides know, is told nothing, and is not listened to."""
    near, far = (End(hub, sock) for sock in tls_pair(cluster, (b"one", b"another")))
    near.lane.send(("said",))
    for end in (near, far):
        assert "the other side" in end.end()
        assert end.messages.empty()
    near, far = (End(hub, sock) for sock in tls_pair(cluster, (b"one", b"one")))
    near.lane.send(("said",))
    assert far.get() == (("said",), None)


def test_a_hub_sleeps_while_tls_is_set_up(hub: Hub, cluster: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room in the socket for what waits: a hub that looked for that would find it again and again."""
    events: list[int] = []
    on_events = SocketLane._on_events

    def counted(lane: SocketLane, found: int) -> None:
        events.append(found)
        on_events(lane, found)

    monkeypatch.setattr(SocketLane, "_on_events", counted)
    one, other = tls_pair(cluster)
    near = End(hub, one)
    near.lane.send(("said",))
    assert not near.lane.drain(0.2)
    assert len(events) < 3
    assert End(hub, other).get() == (("said",), None)
    assert near.lane.drain(WAIT_S)


def test_without_certificates(server: Server) -> None:
    with pytest.raises(ConnectionRefusedError, match="needs certificates"):
        connect(server.address, KEY)


def test_the_key_counts_too(server: Server, cluster: Tls) -> None:
    with pytest.raises(ConnectionRefusedError, match="keys differ"):
        connect(server.address, new_key(), tls=cluster)


def test_nobody_listens(cluster: Tls) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ConnectionRefusedError, match="nobody listens"):
        connect(f"tls:127.0.0.1:{port}", KEY, tls=cluster)


def test_a_machine_that_vanishes_is_noticed_by_the_kernel() -> None:
    """Both ends of a connection between machines ask whether the other one is there."""
    hub = Hub("asked")
    listener = listen("tcp")
    accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    hub.listen(listener, KEY, accepted.put)
    with connect(listener.address, KEY) as dialled, accepted.get(timeout=WAIT_S) as met:
        for end in (dialled, met):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
    hub.close()


def test_a_door_that_is_shut_down_from_outside_listens_again(server: Server, cluster: Tls) -> None:
    with socket.socket(fileno=os.dup(server.listeners[-1].fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)

    def reached() -> bool:
        with contextlib.suppress(ConnectionError):
            connect(server.address, KEY, tls=cluster).close()
            return True
        return False

    assert becomes_true(reached, WAIT_S)

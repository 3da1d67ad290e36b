"""TLS: messages arrive intact, are encrypted on the way, and need a certificate of the cluster's authority."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest
from tests.unit.lanes import End, tls_pair

from colocate.wire import EventLoop, Tls, connect, listen, listen_everywhere, new_key, pack, unpack
from colocate.wire.hello import dial

KEY = new_key()
WAIT_S = 20


def _discard(_sent: bool) -> None:
    """Ignore whether the echo was sent."""


class Server:
    """An echo server of a cluster; its address is that of the last listener, for TLS."""

    def __init__(self, tls: Tls) -> None:
        self.event_loop = EventLoop("server")
        self.listeners = listen_everywhere("127.0.0.1", tls)
        self.lanes: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for each in self.listeners:
            self.event_loop.listen(each, KEY, self._accepted)
        self.address = self.listeners[-1].address

    def _accepted(self, sock: socket.socket) -> None:
        lane = self.event_loop.attach(sock, lambda head, body: _discard(lane.send(head, body)), lambda reason: None)


@pytest.fixture
def server(cluster: Tls) -> Iterator[Server]:
    server = Server(cluster)
    yield server
    server.event_loop.close()


class Tap:
    """A wiretap between a client and a server."""

    def __init__(self, server: Server) -> None:
        self.heard = bytearray()
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tls:127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._bridge)
        self._thread.start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # one side has closed
            while data := source.recv(1 << 16):
                self.heard.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _bridge(self) -> None:
        with self._listener, self._listener.accept()[0] as near, raw(self._server) as far:
            carriers = [threading.Thread(target=self._carry, args=pair) for pair in ((near, far), (far, near))]
            for carrier in carriers:
                carrier.start()
            for carrier in carriers:
                carrier.join()

    def join(self) -> None:
        self._thread.join()


def test_messages_arrive_intact_and_encrypted(server: Server, cluster: Tls) -> None:
    """Messages arrive intact, and a wiretap finds no plain text of them."""
    assert server.address.startswith("tls:127.0.0.1:")
    tap = Tap(server)
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    event_loop = EventLoop("client")
    sock = connect(tap.address, KEY, tls=cluster)
    lane = event_loop.attach(sock, lambda head, body: got.put(unpack(body)), lambda reason: None)
    values = [b"a secret that is said", bytes(range(256)) * (1 << 14), b""]
    for value in values:
        lane.send(("echo",), pack(value))
    assert [got.get(timeout=WAIT_S) for _ in values] == values
    event_loop.close()
    server.event_loop.close()
    tap.join()
    assert len(tap.heard) > 1 << 22
    assert b"a secret" not in tap.heard


def test_unauthorized_clients_are_refused(server: Server, cluster: Tls, stranger: Tls) -> None:
    """A server refuses another cluster, a missing certificate, and plain text; a silent client delays nobody."""
    with pytest.raises(ConnectionRefusedError, match="isn't trusted"):
        connect(server.address, KEY, tls=stranger)
    with pytest.raises(ConnectionRefusedError, match="needs certificates"):
        connect(server.address, KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # TLS 1.3 reports a refusal to a client only with the first bytes after the handshake.
    with (
        raw(server) as sock,
        context.wrap_socket(sock) as secured,
        contextlib.suppress(ConnectionResetError),
        pytest.raises(ssl.SSLError, match="certificate required"),
    ):
        secured.recv(1)
    with raw(server), raw(server) as sock:  # the first one stays silent
        with contextlib.suppress(OSError):
            sock.sendall(bytes(1000))
        sock.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(100):
                pass
        connect(server.address, KEY, tls=cluster).close()


def raw(server: Server) -> socket.socket:
    """Connect to the server's listener without TLS."""
    return dial(server.address.replace("tls:", "tcp:"), WAIT_S)


def test_the_secret_of_one_connection(event_loop: EventLoop, cluster: Tls) -> None:
    """A peer with a certificate and another key receives no message and delivers none."""
    near, far = (End(event_loop, sock) for sock in tls_pair(cluster, (b"one", b"another")))
    near.lane.send(("said",))
    for end in (near, far):
        assert "the other side" in end.end()
        assert end.messages.empty()
    near, far = (End(event_loop, sock) for sock in tls_pair(cluster, (b"one", b"one")))
    near.lane.send(("said",))
    assert far.get() == (("said",), None)


def test_a_machine_that_vanishes_is_noticed_by_the_kernel() -> None:
    """Both ends of a connection between machines have keepalive and a user timeout of 15 seconds."""
    event_loop = EventLoop("asked")
    listening = listen("tcp")
    accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    event_loop.listen(listening, KEY, accepted.put)
    with connect(listening.address, KEY) as dialled, accepted.get(timeout=WAIT_S) as met:
        for end in (dialled, met):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15000
    event_loop.close()

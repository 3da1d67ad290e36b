"""TLS: what goes in comes out, encrypted in between, and only for those whom the cluster's authority has signed."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import socket
import ssl
import struct
import threading
from collections.abc import Iterator

import pytest
from tests.unit.conftest import certificates
from tests.unit.lanes import End, tls_pair

from colocate.wire import EventLoop, SocketLane, Tls, connect, hello, listen, listen_widely, new_key, pack, unpack
from colocate.wire import event_loop as hub_module
from colocate.wire.framing import encode
from colocate.wire.hello import dial

KEY = new_key()
WAIT_S = 20


def _discard(_sent: bool) -> None:
    """What an echo doesn't need to know."""


class Server:
    """Listens for a cluster, and sends back what it receives. Its last listener's address is that of TLS."""

    def __init__(self, tls: Tls) -> None:
        self.event_loop = EventLoop("server")
        self.listeners = listen_widely("127.0.0.1", tls)
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


def test_what_goes_in_comes_out(server: Server, cluster: Tls) -> None:
    assert server.address.startswith("tls:127.0.0.1:")
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    event_loop = EventLoop("client")
    lane = event_loop.attach(
        connect(server.address, KEY, tls=cluster), lambda head, body: got.put(unpack(body)), lambda reason: None
    )
    values = [b"small", bytes(range(256)) * (1 << 14), b""]
    for value in values:
        lane.send(("echo",), pack(value))
    assert [hashlib.sha256(got.get(timeout=WAIT_S)).digest() for _ in values] == [  # type: ignore[arg-type]
        hashlib.sha256(value).digest() for value in values
    ]
    event_loop.close()


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
        event_loop = EventLoop("client")
        sock = connect(f"tls:127.0.0.1:{tap.getsockname()[1]}", KEY, tls=cluster)
        lane = event_loop.attach(sock, lambda head, body: got.put(unpack(body)), lambda reason: None)
        with encode(("echo",), pack("a secret that is said")) as frame:
            lane.send(frame)
        assert got.get(timeout=WAIT_S) == "a secret that is said"
        event_loop.close()
        thread.join()
    server.event_loop.close()
    assert len(heard) > 100
    assert b"a secret" not in heard


def test_a_stranger_is_not_let_in(server: Server, stranger: Tls) -> None:
    with pytest.raises(ConnectionRefusedError, match="isn't trusted"):
        connect(server.address, KEY, tls=stranger)


def test_one_who_trusts_all_but_proves_nothing(server: Server) -> None:
    """Who has no certificate gets no further than TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # TLS 1.3 tells a client that it is refused only with the first bytes after the handshake.
    with (
        raw(server) as sock,
        context.wrap_socket(sock) as secured,
        contextlib.suppress(ConnectionResetError),
        pytest.raises(ssl.SSLError, match="certificate required"),
    ):
        secured.recv(1)


def test_one_who_talks_no_tls(server: Server, cluster: Tls) -> None:
    """It is turned away, and nobody waits for it."""
    with raw(server) as silent, raw(server) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(bytes(1000))
        sock.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(100):
                pass
        connect(server.address, KEY, tls=cluster).close()
        silent.close()


def raw(server: Server) -> socket.socket:
    """What goes to a listener without TLS."""
    return dial(server.address.replace("tls:", "tcp:"), WAIT_S)


def test_a_certificate_that_is_larger_than_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener goes on when there is room again."""
    large = certificates(f"{'long.' * 40}{number}.test" for number in range(300))
    assert len(large.certificate) > 1 << 16

    def narrow(sock: socket.socket) -> None:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, 4096)

    monkeypatch.setattr(hello, "tune", narrow)
    monkeypatch.setattr(hub_module, "tune", narrow)
    server = Server(large)
    connect(server.address, KEY, WAIT_S, large).close()
    server.event_loop.close()


def test_the_secret_of_one_connection(event_loop: EventLoop, cluster: Tls) -> None:
    """Who has a certificate, but not what both sides know, is told nothing, and is not listened to."""
    near, far = (End(event_loop, sock) for sock in tls_pair(cluster, (b"one", b"another")))
    near.lane.send(("said",))
    for end in (near, far):
        assert "the other side" in end.end()
        assert end.messages.empty()
    near, far = (End(event_loop, sock) for sock in tls_pair(cluster, (b"one", b"one")))
    near.lane.send(("said",))
    assert far.get() == (("said",), None)


def test_a_hub_sleeps_while_tls_is_set_up(event_loop: EventLoop, cluster: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room in the socket for what waits: an event loop that looked for that would find it again and again."""
    events: list[int] = []
    on_events = SocketLane._on_events

    def counted(lane: SocketLane, found: int) -> None:
        events.append(found)
        on_events(lane, found)

    monkeypatch.setattr(SocketLane, "_on_events", counted)
    one, other = tls_pair(cluster)
    near = End(event_loop, one)
    near.lane.send(("said",))
    assert not near.lane.drain(0.2)
    assert len(events) < 3
    assert End(event_loop, other).get() == (("said",), None)
    assert near.lane.drain(WAIT_S)


def test_without_certificates(server: Server) -> None:
    with pytest.raises(ConnectionRefusedError, match="needs certificates"):
        connect(server.address, KEY)


def test_who_has_gone_before_being_greeted(server: Server, cluster: Tls) -> None:
    """A port scan, say: nobody else notices."""
    busy, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        busy.set()
        go_on.wait(WAIT_S)

    server.event_loop.later(0.0, wait)
    assert busy.wait(WAIT_S)
    for _ in range(5):
        scan = socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])))
        scan.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        scan.close()  # by a reset
    go_on.set()
    connect(server.address, KEY, tls=cluster).close()


def test_a_machine_that_vanishes_is_noticed_by_the_kernel() -> None:
    """Both ends of a connection between machines ask whether the other one is there."""
    event_loop = EventLoop("asked")
    listening = listen("tcp")
    accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    event_loop.listen(listening, KEY, accepted.put)
    with connect(listening.address, KEY) as dialled, accepted.get(timeout=WAIT_S) as met:
        for end in (dialled, met):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
    event_loop.close()

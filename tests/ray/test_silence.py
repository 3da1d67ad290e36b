"""The search for servers that answer, which asks all at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from colocate_ray.silence import HELLO, SilentNodes, find_answering


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def _answer(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        assert connection.recv(len(HELLO), socket.MSG_WAITALL) == HELLO
        connection.send(b"settings")


def test_only_answering_server_counts(server: socket.socket) -> None:
    """Only a server that answers counts: not one that merely accepts, one that refuses, or an unreachable machine."""
    thread = threading.Thread(target=_answer, args=(server,))
    thread.start()
    with socket.create_server(("127.0.0.1", 0)) as stopped, socket.create_server(("127.0.0.1", 0)) as refusing:
        port = refusing.getsockname()[1]
        refusing.close()
        servers = {
            "answers": server.getsockname(),
            "stopped": stopped.getsockname(),
            "refuses": ("127.0.0.1", port),
            "nowhere": ("192.0.2.1", 1),  # an address reserved for examples
        }
        assert find_answering(servers, 1.0) == {"answers"}
    thread.join()


def test_silent_server_is_remembered(server: socket.socket) -> None:
    """A server that was silent gets less time at the next check, until it answers."""
    silence, servers = SilentNodes(), {"one": server.getsockname()}
    began = time.monotonic()
    assert silence.find_silent(servers) == {"one"}
    first = time.monotonic() - began
    began = time.monotonic()
    assert silence.find_silent(servers) == {"one"}
    assert time.monotonic() - began < first
    for _ in range(2):  # the connections of earlier checks
        server.accept()[0].close()
    answers = threading.Thread(target=_answer, args=(server,))
    answers.start()
    assert not silence.find_silent(servers)
    answers.join()

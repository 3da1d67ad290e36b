"""Event loops and ends for the tests of lanes, and certificates for encrypted connections."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterable, Iterator

import pytest
import trustme
from tests.unit.lanes import KINDS, WAIT_S, End, left_behind, socket_pair, tls_pair

from colocate.wire import EventLoop, Tls
from colocate.wire.tls import get_secured


def certificates(names: Iterable[str] = ("colocate.test",), authority: trustme.CA | None = None) -> Tls:
    """Return certificates of a new authority, or of the given one."""
    authority = authority or trustme.CA()
    one = authority.issue_cert(*names)
    return Tls(
        authority.cert_pem.bytes().decode(),
        "".join(blob.bytes().decode() for blob in one.cert_chain_pems),
        one.private_key_pem.bytes().decode(),
    )


@pytest.fixture(scope="session")
def cluster() -> Tls:
    """Return a cluster's certificates."""
    return certificates()


@pytest.fixture(scope="session")
def stranger() -> Tls:
    """Return another cluster's certificates."""
    return certificates()


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Check that no thread, descriptor or memory of messages is left.

    Earlier ones may end meanwhile, as a template of workers does that no test uses any more.
    """
    threads, (files, mappings) = set(threading.enumerate()), left_behind()
    yield

    def left() -> bool:
        now, mapped = left_behind()
        return not set(now) <= set(files) or mapped > mappings

    assert set(threading.enumerate()) <= threads
    if left():
        gc.collect()  # A failed or exceptional path may have left a cycle.
    assert not left(), (left_behind(), files, mappings)


@pytest.fixture
def event_loop() -> Iterator[EventLoop]:
    event_loop = EventLoop("test")
    yield event_loop
    assert event_loop.close(WAIT_S)


@pytest.fixture(params=[*KINDS, "tls"])
def connected(request: pytest.FixtureRequest) -> tuple[socket.socket, socket.socket]:
    if request.param == "tls":
        return tls_pair(request.getfixturevalue("cluster"))
    return socket_pair(request.param)


@pytest.fixture
def ends(connected: tuple[socket.socket, socket.socket], event_loop: EventLoop) -> tuple[End, End]:
    one, other = connected
    return End(event_loop, one), End(event_loop, other)


@pytest.fixture
def half(connected: tuple[socket.socket, socket.socket], event_loop: EventLoop) -> Iterator[tuple[End, socket.socket]]:
    """Yield an end, and the bare socket of the other side, which a test can neglect."""
    one, other = connected
    with other:
        end = End(event_loop, one)
        if (through := get_secured(other)) is not None:
            through.set_up()
        yield end, other

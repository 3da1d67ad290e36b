"""Requests from worker to worker wait for their answer, and never forever."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.forking import exit_code, fork

from colocate.errors import ClosedError, ColocateError, ForkedError
from colocate.wire import Packed, PeerChannel, Tls, new_key, pack, unpack

KEY = new_key()
WAIT_S = 20
SIZE = 1 << 17


class Store:
    """A request handler; a `hold` request is answered after `ready` is set."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.asked: queue.Queue[threading.Thread] = queue.Queue()

    def __call__(self, head: tuple[Any, ...]) -> tuple[tuple[Any, ...], Packed | None]:
        what, *args = head
        self.asked.put(threading.current_thread())
        if what == "hold":
            self.ready.wait(WAIT_S)
        if what == "array":
            return ("fine", *args), pack(np.full(SIZE, args[0]))
        if what == "fail":
            raise KeyError(args[0])
        if what == "refuse":
            raise ColocateError("isn't to be had any more")
        return ("fine", *args), None


@pytest.fixture
def store() -> Store:
    return Store()


class LastWay(PeerChannel):
    """A channel that announces only its last address, the one for other machines."""

    @property
    def address(self) -> str:
        return super().address.rpartition(",")[2]


@pytest.fixture(params=["unix", "tcp", "tls"])
def peers(request: pytest.FixtureRequest, store: Store, cluster: Tls) -> Iterator[tuple[PeerChannel, PeerChannel]]:
    """Yield a channel that answers from the store, and one that asks."""
    options = {"unix": {}, "tcp": {"host": "127.0.0.1"}, "tls": {"host": "127.0.0.1", "tls": cluster}}[request.param]
    with LastWay(KEY, store, **options) as answering, LastWay(KEY, store, **options) as asking:
        yield answering, asking
        store.ready.set()


class Asking:
    """A request on a thread of its own."""

    def __init__(self, channel: PeerChannel, address: str, head: tuple[Any, ...]) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=self._ask, args=(channel, address, head))
        self._thread.start()

    def _ask(self, channel: PeerChannel, address: str, head: tuple[Any, ...]) -> None:
        try:
            self.result = channel.request(address, head)
        except Exception as error:
            self.result = error

    def get(self) -> Any:
        self._thread.join(WAIT_S)
        return self.result


def test_requests(peers: tuple[PeerChannel, PeerChannel], store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests share one connection, with and without a body; a slow or failed handler harms no other request."""
    answering, asking = peers
    for i in range(3):
        head, body = asking.request(answering.address, ("array", i))
        assert head == ("fine", i)
        assert body is not None
        array = unpack(body)
        assert (array == i).all()
        array += 1  # The array is the asking side's own.
    assert len({store.asked.get(timeout=WAIT_S) for _ in range(3)}) == 1
    slow = Asking(asking, answering.address, ("hold", 1))
    store.asked.get(timeout=WAIT_S)
    assert asking.request(answering.address, ("x", 2)) == (("fine", 2), None)
    assert slow.result is None
    store.ready.set()
    assert slow.get() == (("fine", 1), None)
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    with pytest.raises(ConnectionError, match="could not answer: KeyError: 'lost'"):
        asking.request(answering.address, ("fail", "lost"))
    with pytest.raises(ConnectionError, match="isn't to be had any more"):
        asking.request(answering.address, ("refuse",))
    # A refusal reaches its requester only, and isn't reported as a thread's error.
    assert [report.exc_type for report in reported] == [KeyError]
    assert asking.request(answering.address, ("x", 1)) == (("fine", 1), None)


def test_an_abort(peers: tuple[PeerChannel, PeerChannel], store: Store) -> None:
    """An abort fails all waiting requests and each one about to be sent; later requests work."""
    answering, asking = peers
    known = asking.aborts
    waiting = [Asking(asking, answering.address, ("hold", i)) for i in range(3)]
    for _ in waiting:
        store.asked.get(timeout=WAIT_S)
    asking.abort("the call was cancelled")
    for one in waiting:
        error = one.get()
        assert isinstance(error, ConnectionError)
        assert "the call was cancelled" in str(error)
        assert answering.address in str(error)
    with pytest.raises(ConnectionError, match="aborted before it was made"):
        asking.request(answering.address, ("x", 1), aborts=known)
    assert store.asked.empty()
    assert asking.request(answering.address, ("x", 1), aborts=asking.aborts) == (("fine", 1), None)
    store.ready.set()


def test_closing_asking_side_wakes_requests(store: Store) -> None:
    with PeerChannel(KEY, store) as answering:
        asking = PeerChannel(KEY, store)
        waiting = Asking(asking, answering.address, ("hold", 1))
        store.asked.get(timeout=WAIT_S)
        asking.close()
        assert "the channel was closed" in str(waiting.get())
        with pytest.raises(ClosedError, match="is closed"):
            asking.request(answering.address, ("x", 1))
        with pytest.raises(ClosedError, match="is closed"):
            _ = asking.address
        asking.close()
        store.ready.set()


def test_closing_answering_side_fails_waiting_requests(peers: tuple[PeerChannel, PeerChannel], store: Store) -> None:
    answering, asking = peers
    address = answering.address
    asking.request(address, ("x", 1))
    waiting = Asking(asking, address, ("hold", 1))
    for _ in range(2):
        store.asked.get(timeout=WAIT_S)
    answering.close(timeout=0)
    error = waiting.get()
    assert isinstance(error, ConnectionError)
    assert "ended before it answered" in str(error)
    with pytest.raises(ConnectionError, match="nobody listens"):
        asking.request(address, ("x", 1))
    store.ready.set()
    for thread in threading.enumerate():
        if thread.name == "colocate-peer-serve":
            thread.join(WAIT_S)


def test_a_forked_child_refuses(store: Store) -> None:
    with PeerChannel(KEY, store) as answering, PeerChannel(KEY, store) as asking:
        address = answering.address
        asking.request(address, ("x", 1))
        child = fork()
        if child == 0:
            try:
                asking.request(address, ("x", 2))
            except ForkedError:
                answering.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert exit_code(child, WAIT_S) == 0
        assert asking.request(address, ("x", 3)) == (("fine", 3), None)

"""Turns: the thread that uses a lane's messages receives them itself while it idles, and the hub while it is busy."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from colocate.wire import Hub, SocketLane, Turns

WAIT_S = 20


class Pair:
    """A lane whose messages one thread uses, and the other end of its connection."""

    def __init__(self, stack: ExitStack) -> None:
        here, there = socket.socketpair()
        self.hub, far = Hub("near"), Hub("far")
        self.got: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()
        self.closed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.lane: SocketLane = self.hub.attach(here, self._received, self.closed.put)
        self.far: SocketLane = far.attach(there, lambda head, body: None, lambda reason: None)
        self.turns = Turns(self.lane)
        stack.callback(self.turns.close)
        stack.callback(self.hub.close)
        stack.callback(far.close)

    def _received(self, head: tuple[Any, ...], body: Any) -> None:
        self.got.put((head[0], threading.current_thread().name))
        self.turns.wake()

    def has_news(self) -> bool:
        return not self.got.empty()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def test_the_waiting_thread_receives_itself(pair: Pair) -> None:
    pair.far.send(("one",))
    assert pair.turns.wait(pair.has_news)
    first, _ = pair.got.get()  # may have come before the turn was taken
    waiting = threading.Event()

    def has_news() -> bool:
        waiting.set()
        return pair.has_news()

    sender = threading.Thread(target=lambda: waiting.wait(WAIT_S) and pair.far.send(("two",)))
    sender.start()
    assert pair.turns.wait(has_news)
    sender.join()
    assert first == "one"
    assert pair.got.get() == ("two", threading.current_thread().name)


def test_while_it_is_busy_the_hub_receives(pair: Pair) -> None:
    pair.far.send(("one",))
    pair.turns.wait(pair.has_news)
    pair.got.get()
    pair.far.send(("two",))
    assert pair.got.get(timeout=WAIT_S) == ("two", "colocate-near")


def test_order_is_kept_whoever_receives(pair: Pair) -> None:
    count = 2000
    sender = threading.Thread(target=lambda: [pair.far.send((number,)) for number in range(count)])
    sender.start()
    received = []
    while len(received) < count:
        assert pair.turns.wait(pair.has_news)
        received.append(pair.got.get())
    sender.join()
    assert [number for number, _ in received] == list(range(count))


def test_another_thread_wakes_it(pair: Pair) -> None:
    news = threading.Event()
    waiting = threading.Event()

    def look() -> bool:
        waiting.set()
        return news.is_set()

    def bring() -> None:
        waiting.wait(WAIT_S)
        news.set()
        pair.turns.wake()

    bringer = threading.Thread(target=bring)
    bringer.start()
    assert pair.turns.wait(look)
    bringer.join()


def test_it_ends_with_the_lane(pair: Pair) -> None:
    waiting = threading.Event()

    def never() -> bool:
        waiting.set()
        return False

    ender = threading.Thread(target=lambda: waiting.wait(WAIT_S) and pair.far.close())
    ender.start()
    assert not pair.turns.wait(never)
    ender.join()
    assert pair.closed.get(timeout=WAIT_S) == "the other side closed"
    assert not pair.turns.wait(never)


def test_it_ends_when_this_side_closes_from_another_thread(pair: Pair) -> None:
    waiting = threading.Event()

    def never() -> bool:
        waiting.set()
        return False

    ender = threading.Thread(target=lambda: waiting.wait(WAIT_S) and pair.lane.close())
    ender.start()
    assert not pair.turns.wait(never)
    ender.join()


def test_what_the_socket_does_not_take_at_once_is_sent_while_the_turn_lasts(pair: Pair) -> None:
    large = "x" * (8 << 20)
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    here, there = socket.socketpair()
    with ExitStack() as stack:
        hub = Hub("other")
        stack.callback(hub.close)
        mine = hub.attach(here, lambda head, body: None, lambda reason: None)
        far = hub.attach(there, lambda head, body: received.put(len(head[0])), lambda reason: None)
        turns = Turns(mine)
        stack.callback(turns.close)
        sent = threading.Event()

        def send() -> bool:
            if not sent.is_set():
                sent.set()
                mine.send((large,))
                threading.Thread(target=lambda: (done.put(received.get(timeout=WAIT_S)), turns.wake())).start()
            return not done.empty()

        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        assert turns.wait(send)
        assert done.get() == len(large)
        assert not far.closed

"""A peer that knows the key connects, although strangers hold connections to the listener."""

from __future__ import annotations

import contextlib
import socket

import pytest

from colocate import wire
from colocate.wire import Tls, connect, event_loop, hello, listen, new_key
from colocate.wire.hello import TurnedAway, connect_with_retry, dial

KEY = new_key()
WAIT_S = 20


@pytest.mark.parametrize("encrypted", [False, True])
def test_silent_strangers_delay_no_peer(encrypted: bool, cluster: Tls) -> None:
    """Silent strangers, who don't speak TLS, displace only each other, and a peer with the key connects."""
    taken: list[socket.socket] = []
    tls = cluster if encrypted else None
    listening = listen("tcp", tls=tls)
    loop = wire.EventLoop("test")
    loop.listen(listening, KEY, taken.append)
    with contextlib.ExitStack() as crowd:
        for _ in range(3 * event_loop._MOST_STRANGERS):
            crowd.enter_context(dial(listening.address.replace("tls:", "tcp:"), WAIT_S))
        connect(listening.address, KEY, WAIT_S, tls).close()
    assert loop.close(WAIT_S)
    for sock in taken:
        sock.close()


def test_refused_dialler_retries_until_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dialler that was turned away tries again until its timeout, whose error says why."""
    attempts = iter([TurnedAway("flooded"), TurnedAway("flooded"), None])

    def attempt(_left: object) -> str:
        if error := next(attempts):
            raise error
        return "let in"

    assert connect_with_retry(attempt, WAIT_S) == "let in"
    attempts = iter([TurnedAway("flooded")])
    monkeypatch.setattr(hello, "_AGAIN_S", 4 * WAIT_S)  # there is no time for another attempt
    with pytest.raises(TimeoutError, match="flooded, until the time was over"):
        connect_with_retry(attempt, WAIT_S)

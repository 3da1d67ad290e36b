"""Holds: what the driver tells the ranks of a call that nobody waits for any more."""

from __future__ import annotations

from typing import Any

import pytest

import colocate
from colocate._crew.crew import Crew
from colocate._protocol.to_worker import Unwanted
from colocate.testing.gate import Gate
from colocate.testing.probes.plain import Log
from colocate.testing.waiting import PATIENCE_S


def test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a later call that fails amid a hold, on two ranks, all are told as soon as the first one has failed."""
    told: list[int] = []
    send = Crew.send

    def noting(crew: Crew, slots: Any, message: Any, body: Any = None) -> None:
        if isinstance(message, Unwanted):
            told.append(message.seq)
        send(crew, slots, message, body)

    monkeypatch.setattr(Crew, "send", noting)
    with colocate.connect("local") as runtime, runtime.reserve(4) as pool, Gate() as first, Gate() as last:
        group = pool.spawn({"log": colocate.role(Log)})
        log = group.role("log", Log)
        with Gate() as second, Gate() as third:
            failing = log.at.submit([first.address, None, None, None], ["raise", "add", "add", "add"], "a")
            gates = [None, second.address, third.address, last.address]
            later = log.at.submit(gates, ["add", "raise", "raise", "add"], "b")
            for gate in (first, second, third, last):
                gate.wait_for()
            first.open()
            assert failing.exception(PATIENCE_S) is not None
        last.open()
        assert later.exception(PATIENCE_S) is not None
    assert len(told) == 1

"""What a call tells that it was given: of N ranks each may get a part of each, in some time."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from colocate import wire
from colocate._protocol import parts
from colocate._protocol.taken import MANY, summed
from colocate.worker.residents import peers
from colocate.worker.residents.peers import ChannelPeers
from colocate.worker.residents.store import Entry


def test_many_are_told_as_one() -> None:
    """Each resident by itself, and beside what lay here already, which is told as it is; no bytes are lost."""
    taken = [(7, rank, 10, 1.0 + rank, 2.0 + rank, rank, "" if rank < 9 else f"no {rank}") for rank in range(1, 64)]
    assert summed(taken[:8]) == taken[:8]
    few = [(9, 3, 1, 5.0, 6.0, 0, "")]
    here = [(7, 0, 10, 0.0, 0.0, 0, "")] * 20
    assert summed(here) == here
    assert sorted(summed([*here, *taken, *few])) == sorted(
        [*here, (7, MANY, 630, 2.0, 65.0, sum(range(64)), "no 9"), *few]
    )


@pytest.mark.parametrize("question", [parts.Part(7), parts.Slice(7, 1, 3)], ids=["part", "slice"])
def test_how_long_a_value_was_waited_for(monkeypatch: pytest.MonkeyPatch, question: Any) -> None:
    """Until it was made: that is no part of the transfer, as it is to take rows of it and to pack it."""
    now = [100.0]

    def later(seconds: float, value: Any) -> Any:
        now[0] += seconds
        return value

    entry = Entry([1, 2, 3], maker="role.method", ready=True)
    host: Any = SimpleNamespace(
        boot=SimpleNamespace(host=wire.LOOPBACK, secret=b"secret", device="cpu", ports=None),
        device=SimpleNamespace(aside=nullcontext),
        broken=None,
        store=SimpleNamespace(wait=lambda key: later(5.0, entry), reading=lambda entry: nullcontext()),
        packed=lambda value, maker, wait: later(3.0, value),
    )
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    answer, body = ChannelPeers(host)._found(question)
    assert answer == parts.Value(5.0)
    assert body == ([1, 2, 3] if isinstance(question, parts.Part) else [2, 3])

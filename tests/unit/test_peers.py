"""How long a transfer takes: what a question has waited for a value to be made is no part of that."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from colocate import wire
from colocate._protocol import parts
from colocate.worker.residents import peers
from colocate.worker.residents.peers import ChannelPeers
from colocate.worker.residents.store import Entry


@pytest.mark.parametrize("question", [parts.Part(7), parts.Slice(7, 1, 3)], ids=["part", "slice"])
def test_how_long_a_value_was_waited_for(monkeypatch: pytest.MonkeyPatch, question: Any) -> None:
    """Until it was made: to take rows of it and to pack it is a part of the transfer."""
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

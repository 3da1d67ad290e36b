"""Counters for the messages and bytes between a driver and its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from colocate import ColocatedGroup
from colocate._protocol import to_worker
from colocate._protocol.message import Message, decode_head
from colocate.wire import Packed


class Traffic:
    """Counts the messages to a runtime's workers, and the bytes of all values that pass through the driver.

    A value that is handed over by reference counts no bytes.
    """

    def __init__(self, group: ColocatedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[Message] = []
        self.sent_bytes: list[int] = []
        self.received_bytes: list[int] = []
        executor = group._node.services.executor
        frame, numbered = executor.frame, executor.numbered

        def counted(head: tuple[Any, ...], body: Any = None) -> Any:
            self.messages.append(decode_head(head))
            self.sent_bytes.append(_count_bytes(body))
            return frame(head, body)

        def counted_calls(message: Any, body: Any) -> Any:
            self.messages.append(message)
            self.sent_bytes.append(_count_bytes(body))
            return numbered(message, body)

        monkeypatch.setattr(executor, "frame", counted)
        monkeypatch.setattr(executor, "numbered", counted_calls)
        order = type(group._node.order)
        monkeypatch.setattr(order, "on_call_done", self._wrap_receive(order.on_call_done))
        residents = type(group._node.residents)
        monkeypatch.setattr(residents, "on_part", self._wrap_receive(residents.on_part))

    def _wrap_receive(self, hear: Callable[..., None]) -> Callable[..., None]:
        def heard(*args: Any) -> None:
            self.received_bytes.append(_count_bytes(args[-1]))  # A message's body is the last argument.
            hear(*args)

        return heard

    def calls_sent(self) -> list[int]:
        """Return the number of calls in each message with calls so far."""
        kinds = (to_worker.Batch, to_worker.Call)
        return [
            len(message.calls) if isinstance(message, to_worker.Batch) else 1
            for message in self.messages
            if isinstance(message, kinds)
        ]

    def total_bytes(self) -> int:
        """Return the bytes of all values through the driver so far."""
        return sum(self.sent_bytes) + sum(self.received_bytes)


def _count_bytes(body: Any) -> int:
    return body.nbytes if isinstance(body, Packed) else 0

"""Messages of device samples: the first goes to workers, the other comes from workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from colocate._protocol.message import Message, message

Sampled: TypeAlias = "tuple[str, str, float | None, int | None, int | None, float | None, float | None, Sequence[int]]"
"""UUID, name, use (of 1), memory in use and in all (bytes), power (watts), temperature (°C), new XID errors."""


@message
class AskDevices(Message):
    """Sample GPUs of the worker's node; answered by `DevicesTold`."""

    uuids: Sequence[str]  # the GPUs to sample; empty to ask for the UUID of the slot's own GPU


@message
class DevicesTold(Message):
    """The answer to `AskDevices`."""

    own: str  # the UUID of the slot's GPU; "" if not asked for, or unknown
    samples: Sequence[Sampled]
    trouble: str  # the reason why sampling isn't possible on this node; "" for none

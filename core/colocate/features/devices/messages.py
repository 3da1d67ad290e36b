"""Defines the messages about device samples. The first goes to workers, and the second comes from workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from colocate._protocol.message import Message, message

Sampled: TypeAlias = "tuple[str, str, float | None, int | None, int | None, float | None, float | None, Sequence[int]]"
"""UUID, name, use (of 1), memory in use and in all (bytes), power (watts), temperature (°C), new XID errors."""


@message
class AskDevices(Message):
    """Ask a worker to sample GPUs of the node. The worker answers with `DeviceReport`."""

    uuids: Sequence[str]  # The GPUs to sample; empty to ask for the UUID of the slot's own GPU.


@message
class DeviceReport(Message):
    """The worker's answer to `AskDevices`."""

    own_uuid: str  # The UUID of the slot's GPU; "" if not asked for, or if unknown.
    samples: Sequence[Sampled]
    trouble: str  # The reason why sampling isn't possible on this node; "" for none.

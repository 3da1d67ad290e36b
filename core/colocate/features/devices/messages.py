"""What driver and workers say of devices: the first to workers, the other from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from colocate._protocol.message import Message, message

Sampled: TypeAlias = "tuple[str, str, float | None, int | None, int | None, float | None, float | None, Sequence[int]]"
"""UUID, name, use (of 1), memory in use and in all (bytes), power (watts), temperature (°C), XID errors since last."""


@message
class AskDevices(Message):
    """Sample GPUs of the worker's node; answered by `DevicesTold`."""

    uuids: Sequence[str]  # which; none for the name of the slot's own one


@message
class DevicesTold(Message):
    """Tell what was asked for."""

    own: str  # the UUID of the slot's GPU; "" where that wasn't asked for, or isn't known
    samples: Sequence[Sampled]
    trouble: str  # why nobody can sample here; "" where it is done

"""What a worker tells of its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, TypeAlias

import attrs

from colocate.errors import ConfigError


class Purpose(Enum):
    """What memory is for. What is of several kinds counts as the first of them."""

    __hash__ = object.__hash__  # an enum's own runs Python code, and each tensor is noted by one of these

    PARAMETERS = auto()
    GRADIENTS = auto()
    OPTIMIZER = auto()
    BUFFERS = auto()
    DECLARED = auto()
    TENSORS = auto()
    RESIDENTS = auto()

    @property
    def word(self) -> str:
        """Return what it is called."""
        return self.name.lower()


TAGS: Mapping[str, tuple[Purpose, ...]] = {
    "weights": (Purpose.PARAMETERS, Purpose.BUFFERS),
    "grads": (Purpose.GRADIENTS,),
    "optimizer": (Purpose.OPTIMIZER,),
    "cache": (Purpose.DECLARED, Purpose.TENSORS),
}
"""What of a role's memory can sleep, by the words for it (`method.TAGS`)."""


def counts_as(role: str, told: object, by: str) -> dict[Purpose, int]:
    """Return what a role tells of its memory, which is bytes by tag, as the ledger counts it.

    Raises:
        ConfigError: It tells something else; `by` says what has told it.
    """
    if not isinstance(told, Mapping) or not all(
        tag in TAGS and isinstance(size, int) and size >= 0 for tag, size in told.items()
    ):
        raise ConfigError(f"{by} of role {role!r} returns {told!r}: it returns bytes by tag, of {', '.join(TAGS)}")
    return {Purpose.TENSORS if tag == "cache" else TAGS[tag][0]: size for tag, size in told.items()}


Sizes: TypeAlias = "Mapping[str, Sequence[Mapping[str, int]]]"
"""What roles hold by name: the bytes on the slot's device, and those of the host, each by kind."""


@attrs.frozen
class Ledger:
    """A worker's memory in bytes."""

    # By role, kind (see `Purpose`) and device; residents of functions are those of a role without a name
    roles: Mapping[str, Mapping[tuple[str, str], int]]
    shared: Mapping[str, int]  # what roles hold that counts with another role, by role
    asleep: Mapping[str, int]  # what roles hold that isn't in memory (`group.sleep`), by role
    # What of roles was to sleep with that and is in memory, by role and why
    kept_awake: Mapping[str, Mapping[str, int]]
    partial: tuple[str, ...]  # roles that hold more objects than were looked at
    # What of the process's memory is its own, "private"; of it what was so before the first role was constructed,
    # "empty", was pinned for what sleeps of a device, "pinned", and is shared with other forks, "shared". None where
    # the process is the driver's.
    process: Mapping[str, int] | None
    # What torch knows of the slot's device: "allocated" and "reserved" by this process, "used" by anybody, "total", and
    # "nccl" by this process's communicators, where these tell; None of a slot without one. Without what sleeps and has
    # kept its addresses.
    gpu: Mapping[str, int] | None
    # What methods have allocated on it at most while they ran, by role and method; None where nobody knows
    peaks: Mapping[str, int] | None
    # What the processes that roles have started have for themselves, by role and name
    children: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)
    # What features tell of roles, by feature and role (`OfWorker.told`)
    told: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)

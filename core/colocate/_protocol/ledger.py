"""Purposes of a role's memory, and the tags for these purposes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from colocate.errors import ConfigError


class Purpose(Enum):
    """The purpose of a piece of memory. Memory with several purposes counts for the first in this order."""

    __hash__ = object.__hash__  # Enum's own hash is slow Python code, and every tensor is recorded under a purpose.

    PARAMETERS = auto()
    GRADIENTS = auto()
    OPTIMIZER = auto()
    BUFFERS = auto()
    DECLARED = auto()
    TENSORS = auto()
    RESIDENTS = auto()

    @property
    def word(self) -> str:
        return self.name.lower()


TAGS: Mapping[str, tuple[Purpose, ...]] = {
    "weights": (Purpose.PARAMETERS, Purpose.BUFFERS),
    "grads": (Purpose.GRADIENTS,),
    "optimizer": (Purpose.OPTIMIZER,),
    "cache": (Purpose.DECLARED, Purpose.TENSORS),
}
"""The purposes of a role's memory that can sleep, by tag (`method.TAGS`)."""


def count_by_purpose(role: str, told: object, by: str) -> dict[Purpose, int]:
    """Convert a role's report of bytes by tag into bytes by purpose for the ledger.

    Raises:
        ConfigError: The report is malformed; `by` names the method that returned the report.
    """
    if not isinstance(told, Mapping) or not all(
        tag in TAGS and isinstance(size, int) and size >= 0 for tag, size in told.items()
    ):
        raise ConfigError(f"{by} of role {role!r} returns {told!r}: it returns bytes by tag, of {', '.join(TAGS)}")
    return {Purpose.TENSORS if tag == "cache" else TAGS[tag][0]: size for tag, size in told.items()}

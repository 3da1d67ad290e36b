"""What memory of roles is for, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

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

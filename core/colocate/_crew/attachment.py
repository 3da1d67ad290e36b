"""`Attachment`: how a driver has a pool that was detached once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs


@attrs.define(eq=False)
class Attachment:
    """How this driver has a pool that was detached once.

    Attributes:
        name: What it is called in the cluster.
        own: Whether it ends with this driver.
        ttl: Seconds that it lives without any.
        groups: The groups that belong to it, by name; others end with this driver.
        changed: Tells those after this driver which groups there are, and what they are to know of them.
    """

    name: str
    own: bool
    ttl: float
    groups: set[str]
    changed: Callable[[], None]
    lock: threading.Lock = attrs.field(factory=threading.Lock)  # what its keepers are told is told in order

"""Groups whose roles have several placements, for each executor."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import colocate
from colocate import ColocatedGroup

from .rows import Rows

EXECUTORS: dict[str, dict[str, Any]] = {
    "threads": {},
    "strict": {"strict": True},
    "processes": {"processes": True},
}


def layout(slots: int) -> dict[str, dict[str, Any]]:
    """Return the placement of each role, by name."""
    return {
        "all": {},
        "back": {"slots": range(slots)[::-1]},
        "ends": {"slots": [0, slots - 1]},
        "last": {"slots": [slots - 1]},
        "tensor": {"mesh": {"dp": slots // 2, "tp": 2}} if slots % 2 == 0 else {"mesh": {"tp": slots}},
    }


def ranks(slots: int) -> dict[str, int]:
    """Return the number of ranks of each role."""
    return {name: len(place.get("slots", range(slots))) for name, place in layout(slots).items()}


def parts(slots: int) -> dict[str, int]:
    """Return the number of parts into which each role's rows are split."""
    return {
        name: place["mesh"].get("dp", 1) if "mesh" in place else ranks(slots)[name]
        for name, place in layout(slots).items()
    }


def spawn(stack: ExitStack, executor: str, slots: int) -> ColocatedGroup:
    """Spawn a group of roles with these placements."""
    runtime = stack.enter_context(colocate.connect("local", **EXECUTORS[executor]))
    pool = stack.enter_context(runtime.reserve(slots=slots))
    return pool.spawn({name: colocate.role(Rows).on(**place) for name, place in layout(slots).items()}, name="rows")

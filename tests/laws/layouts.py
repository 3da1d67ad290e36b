"""Groups whose roles lie on their slots in several ways, on the executors that there are."""

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
    """How the roles lie, by name."""
    return {
        "all": {},
        "back": {"slots": range(slots)[::-1]},
        "ends": {"slots": [0, slots - 1]},
        "last": {"slots": [slots - 1]},
        "tensor": {"mesh": {"dp": slots // 2, "tp": 2}} if slots % 2 == 0 else {"mesh": {"tp": slots}},
    }


def ranks(slots: int) -> dict[str, int]:
    """How many ranks each role has."""
    return {name: len(place.get("slots", range(slots))) for name, place in layout(slots).items()}


def parts(slots: int) -> dict[str, int]:
    """Into how many parts the rows of each role's calls go."""
    return {
        name: place["mesh"].get("dp", 1) if "mesh" in place else ranks(slots)[name]
        for name, place in layout(slots).items()
    }


def spawn(stack: ExitStack, executor: str, slots: int) -> ColocatedGroup:
    """A group of such roles."""
    runtime = stack.enter_context(colocate.connect("local", **EXECUTORS[executor]))
    pool = stack.enter_context(runtime.reserve(slots=slots))
    return pool.spawn({name: colocate.role(Rows).on(**place) for name, place in layout(slots).items()}, name="rows")

"""Who waited for whom on the slots that roles share: what it costs that they do."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import attrs

from colocate._system.sizes import size_text


class Busy(NamedTuple):
    """A stretch of time in which a slot ran something of a role.

    Attributes:
        start: When it began.
        end: When it was over.
        role: The role.
        ready: When it could have begun if the slot had been its own: it was called, and all that it uses was there.
    """

    start: float
    end: float
    role: str
    ready: float


@attrs.frozen
class RoleUse:
    """What a role did on its slots, and what others on them did to it.

    Attributes:
        group: Name of its group.
        role: Its name.
        busy: Seconds that its ranks ran, added up, with its sleeps and wakes.
        waited: Seconds that its calls could have run on a slot where another role ran, by that.
        moved: Bytes that it slept and woke with, for others' sake.
    """

    group: str
    role: str
    busy: float
    waited: Mapping[str, float]
    moved: int


def contention(slots: Mapping[tuple[str, int], Iterable[Busy]], moved: Mapping[tuple[str, str], int]) -> list[RoleUse]:
    """What roles did to each other.

    Args:
        slots: What each slot ran, by group and slot.
        moved: Bytes that were moved, by group and role.
    """
    busy: dict[tuple[str, str], float] = {}
    waited: dict[tuple[str, str], dict[str, float]] = {}
    for (group, _), stretches in slots.items():
        lane = sorted(stretches)
        for each in lane:
            key = group, each.role
            busy[key] = busy.get(key, 0.0) + each.end - each.start
            its = waited.setdefault(key, {})
            for other, seconds in _in_the_way(each, lane):
                its[other] = its.get(other, 0.0) + seconds
    return [RoleUse(*key, busy[key], waited[key], moved.get(key, 0)) for key in busy]


def _in_the_way(waiting: Busy, lane: Sequence[Busy]) -> Iterator[tuple[str, float]]:
    """Other roles that ran on the slot between a call's being ready and its beginning, and for how long."""
    for before in reversed(lane[: bisect_right(lane, waiting.start, key=lambda each: each.start)]):
        if before.end <= waiting.ready:  # a slot runs one after the other: so are those before it
            return
        overlap = min(before.end, waiting.start) - max(before.start, waiting.ready)
        if before.role != waiting.role and overlap > 0:
            yield before.role, overlap


def waits(found: Sequence[RoleUse]) -> list[dict[str, str | float]]:
    """The same as rows, where roles share slots: busy seconds, those waited for others, and what was moved."""
    if not any(use.waited or use.moved for use in found):
        return []
    several = len({use.group for use in found}) > 1
    return [
        {
            **({"group": use.group} if several else {}),
            "role": use.role or "functions",
            "busy (s)": round(use.busy, 3),
            "waited (s)": round(sum(use.waited.values()), 3),
            "for": ", ".join(f"{other or 'functions'} {seconds:.3f}" for other, seconds in _longest(use.waited)),
            **({"moved": size_text(use.moved)} if any(each.moved for each in found) else {}),
        }
        for use in found
    ]


def _longest(waited: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(waited.items(), key=lambda item: -item[1])

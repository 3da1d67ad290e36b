"""Who waited for whom on the slots that roles share: what it costs that they do."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import attrs

from colocate.driver import Interval, length, merged, without
from colocate.texts import size_text


class Move(enum.Enum):
    """Memory of a role that slept or woke: by itself, or while a call waited for it, of whose time it is a part."""

    ALONE = enum.auto()
    IN_CALL = enum.auto()


class Busy(NamedTuple):
    """A stretch of time in which a slot ran something of a role."""

    start: float  # when it began
    end: float  # when it was over
    role: str
    ready: float  # when it could have begun if the slot had been its own: it was called, and all that it uses was there
    move: Move | None = None  # how memory of the role slept or woke, if that was it


@attrs.frozen
class RoleUse:
    """What a role did on its slots, and what others on them did to it."""

    group: str
    role: str
    # seconds that its ranks ran, added up, with what its calls waited for memory to move, and with sleeps and
    # wakes that were asked for; calls of a rank that overlap count once
    busy: float
    # seconds in which a call of it could have run on a slot where another role ran, by that; of several calls
    # that waited at once they count once, and those of all slots are added up
    waited: Mapping[str, float]
    moved: int  # bytes that it slept and woke with, all together
    transferred: int = 0  # bytes of kept results that its calls got from other workers
    # seconds that it wasn't asleep as a whole, all ranks added up; None where no role has slept
    awake: float | None = None
    # seconds in which it slept and woke and nothing was computed on the slot. They are part of what is busy: of
    # its own, and of the roles for which it made room
    moving: float = 0.0
    moves: int = 0  # how often it slept and woke, on all ranks


@attrs.frozen
class HandedOver:
    """What fusing saved of copies: kept results of a role that lay where another one used them."""

    group: str
    maker: str  # the role that had made them
    user: str  # the role that used them
    nbytes: int  # bytes of their tensors and arrays, each use counted


def contention(
    slots: Mapping[tuple[str, int], Iterable[Busy]],
    moved: Mapping[tuple[str, str], tuple[int, int]],
    transferred: Mapping[tuple[str, str], int] = MappingProxyType({}),
    awake: Mapping[tuple[str, str], float] = MappingProxyType({}),
) -> list[RoleUse]:
    """Return what roles did to each other."""
    busy: dict[tuple[str, str], float] = {}
    moving: dict[tuple[str, str], float] = {}
    waited: dict[tuple[str, str], dict[str, float]] = {}
    for (group, _), stretches in slots.items():
        ran: dict[str, list[Interval]] = {}
        waits: dict[str, list[Interval]] = {}
        for each in sorted(stretches, key=lambda each: each[:4]):
            its_runs, its_waits = ran.setdefault(each.role, []), waits.setdefault(each.role, [])
            if each.move is not None:
                moving[group, each.role] = moving.get((group, each.role), 0.0) + each.end - each.start
            if each.move is not Move.IN_CALL:
                its_runs.append((each.start, each.end))
                its_waits.append((each.ready, each.start))
        running = {role: merged(intervals) for role, intervals in ran.items()}
        for role, intervals in waits.items():
            key = group, role
            busy[key] = busy.get(key, 0.0) + length(running[role])
            its = waited.setdefault(key, {})
            waiting = merged(intervals)
            for other, times in running.items():
                if other != role and (seconds := length(waiting) - length(without(waiting, times))):
                    its[other] = its.get(other, 0.0) + seconds
    found = []
    for key in busy:
        moves, nbytes = moved.get(key, (0, 0))
        came, is_awake, seconds = transferred.get(key, 0), awake.get(key), moving.get(key, 0.0)
        found.append(RoleUse(*key, busy[key], waited[key], nbytes, came, is_awake, seconds, moves))
    return found


CAUSES = 12
"""So many are told by name."""


def idling(found: Mapping[str, float]) -> list[dict[str, str | float]]:
    """Return rows of what slots waited for while they ran nothing: seconds, and which part of all of these."""
    whole = sum(found.values())
    told = sorted(found.items(), key=lambda each: -each[1])
    rest = sum(seconds for _, seconds in told[CAUSES:])
    told = [*told[:CAUSES], *([(f"{len(told) - CAUSES} others", rest)] if rest else [])]
    return [
        {"waited for": why, "idle (s)": round(seconds, 3), "part": f"{seconds / whole:.0%}"} for why, seconds in told
    ]


def waits(found: Sequence[RoleUse]) -> list[dict[str, str | float]]:
    """The same as rows, where there is anything to tell: seconds busy, waited for others, awake and moving; bytes."""
    slept, transferred = any(use.moved for use in found), any(use.transferred for use in found)
    if not (slept or transferred or any(use.waited for use in found)):
        return []
    several = len({use.group for use in found}) > 1
    return [
        {
            **({"group": use.group} if several else {}),
            "role": use.role or "functions",
            "busy (s)": round(use.busy, 3),
            "waited (s)": round(sum(use.waited.values()), 3),
            "for": ", ".join(
                f"{other or 'functions'} {seconds:.3f}"
                for other, seconds in sorted(use.waited.items(), key=lambda item: -item[1])
            ),
            **({"awake (s)": "" if use.awake is None else round(use.awake, 3)} if slept else {}),
            **({"moves": use.moves, "moving (s)": round(use.moving, 3)} if slept else {}),
            **({"moved": size_text(use.moved) if use.moved else ""} if slept else {}),
            **({"transferred": size_text(use.transferred) if use.transferred else ""} if transferred else {}),
        }
        for use in found
    ]

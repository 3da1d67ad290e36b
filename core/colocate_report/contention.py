"""Measure contention: the time that roles on shared slots wait for each other."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import attrs

from colocate.driver import Interval, measure_length, merge_intervals, subtract_intervals
from colocate.texts import format_size


class Move(enum.Enum):
    """How a role's memory was moved: alone, or within the time of a waiting call."""

    ALONE = enum.auto()
    IN_CALL = enum.auto()


class BusySpan(NamedTuple):
    """A time span in which a slot ran a role."""

    start: float
    end: float
    role: str
    ready: float  # The time when the call and all inputs had arrived.
    move: Move | None = None  # How the role's memory moved; None for a call.


@attrs.frozen
class RoleUse:
    """A role's use of shared slots, and the time that the role waited for other roles."""

    group: str
    role: str
    # Seconds of calls, with their memory moves, and of requested sleeps and wakes, summed over ranks.
    busy: float
    # Seconds in which a call was ready while another role ran on the slot, by the other role, summed over slots.
    waited: Mapping[str, float]
    moved: int  # The bytes that all sleeps and wakes have moved.
    transferred: int = 0  # The bytes of residents that calls received from other workers.
    # Seconds that the role was awake, at least in part, summed over ranks; None if no role has slept.
    awake: float | None = None
    # Seconds of memory moves in which the slot computed nothing. `busy` of this or another role includes them.
    moving: float = 0.0
    moves: int = 0  # The number of sleeps and wakes on all ranks.


@attrs.frozen
class Handover:
    """The copies that fusing has avoided, because one role used another role's residents on the same slots."""

    group: str
    maker: str
    user: str
    nbytes: int  # The bytes of tensors and arrays, counted for each use.


def measure_contention(
    slots: Mapping[tuple[str, int], Iterable[BusySpan]],
    moved: Mapping[tuple[str, str], tuple[int, int]],
    transferred: Mapping[tuple[str, str], int] = MappingProxyType({}),
    awake: Mapping[tuple[str, str], float] = MappingProxyType({}),
) -> list[RoleUse]:
    """Compute the busy and waiting times of each role from the time spans of each slot."""
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
        running = {role: merge_intervals(intervals) for role, intervals in ran.items()}
        for role, intervals in waits.items():
            key = group, role
            busy[key] = busy.get(key, 0.0) + measure_length(running[role])
            waited_for = waited.setdefault(key, {})
            waiting = merge_intervals(intervals)
            for other, times in running.items():
                if other != role and (
                    seconds := measure_length(waiting) - measure_length(subtract_intervals(waiting, times))
                ):
                    waited_for[other] = waited_for.get(other, 0.0) + seconds
    uses = []
    for key in busy:
        moves, nbytes = moved.get(key, (0, 0))
        received, is_awake, seconds = transferred.get(key, 0), awake.get(key), moving.get(key, 0.0)
        uses.append(RoleUse(*key, busy[key], waited[key], nbytes, received, is_awake, seconds, moves))
    return uses


CAUSES = 12
"""Number of causes that a table names."""


def make_idle_rows(found: Mapping[str, float]) -> list[dict[str, str | float]]:
    """Return a table row for each cause of idle time, with seconds and share."""
    whole = sum(found.values())
    causes = sorted(found.items(), key=lambda each: -each[1])
    rest = sum(seconds for _, seconds in causes[CAUSES:])
    causes = [*causes[:CAUSES], *([(f"{len(causes) - CAUSES} others", rest)] if rest else [])]
    return [
        {"waited for": why, "idle (s)": round(seconds, 3), "part": f"{seconds / whole:.0%}"} for why, seconds in causes
    ]


def make_contention_rows(found: Sequence[RoleUse]) -> list[dict[str, str | float]]:
    """Return a table row for each role, with busy, waiting and awake seconds, and moved bytes.

    Empty if no role slept, received residents or waited.
    """
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
            **({"moved": format_size(use.moved) if use.moved else ""} if slept else {}),
            **({"transferred": format_size(use.transferred) if use.transferred else ""} if transferred else {}),
        }
        for use in found
    ]

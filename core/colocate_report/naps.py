"""How long roles are awake."""

from __future__ import annotations

from colocate import MoveRecord


class Naps:
    """How long each role has been awake since a run's beginning, rank by rank."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._ranks: set[tuple[str, str, int]] = set()
        self._asleep: dict[tuple[str, str, int], float] = {}  # since when
        self._slept: dict[tuple[str, str], float] = {}

    def see(self, group: str, role: str, rank: int) -> None:
        """There is such a rank."""
        self._ranks.add((group, role, rank))

    def note(self, record: MoveRecord) -> None:
        """One has gone to sleep, or is awake: also where only a part of it is."""
        rank = record.group, record.role, record.rank
        self._ranks.add(rank)
        if record.asleep:
            self._asleep.setdefault(rank, record.end)
        elif (since := self._asleep.pop(rank, None)) is not None:
            self._add(rank, record.start - since)

    def end(self, group: str, now: float) -> None:
        """All of a group are awake from now on."""
        for rank in [rank for rank in self._asleep if rank[0] == group]:
            self._add(rank, now - self._asleep.pop(rank))

    def awake(self, now: float) -> dict[tuple[str, str], float]:
        """Seconds by group and role, all ranks added up; none when nobody has slept."""
        if not self._asleep and not self._slept:
            return {}
        found: dict[tuple[str, str], float] = {}
        for rank in self._ranks:
            if rank[1]:
                since = self._asleep.get(rank, now)
                found[rank[:2]] = found.get(rank[:2], 0.0) + since - self._began
        return {role: seconds - self._slept.get(role, 0.0) for role, seconds in found.items()}

    def _add(self, rank: tuple[str, str, int], seconds: float) -> None:
        self._slept[rank[:2]] = self._slept.get(rank[:2], 0.0) + max(0.0, seconds)

"""The driver's marks for roles that may have sleeping memory. Only the workers know for certain."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import TypeAlias

import attrs

Mark: TypeAlias = tuple[str, str]
"""A role and a tag of its memory."""


@attrs.frozen(eq=False)
class SleepMark:
    """A mark for one sleep of a role. Marks are compared by identity."""

    until_woken: bool = False  # Whether calls of the role fail instead of waking the memory.


class Sleepers:
    """Marks for memory that may be asleep. A call of a marked role is sent after a wake, or fails (`tags_until_woken`).

    A mark is made before a sleep is sent and renewed afterwards, and a wake removes only marks that it has seen. So a
    race may leave a mark too long, but never removes a mark too early.
    """

    def __init__(self) -> None:
        self.marks: dict[Mark, SleepMark] = {}  # The key is a role and a tag.
        self._lock = threading.Lock()

    def add_marks(self, role: str, tags: Iterable[str], until_woken: bool) -> None:
        """Mark memory as possibly asleep. Called before a sleep is sent, and again afterwards."""
        with self._lock:
            for tag in tags:
                self.marks[role, tag] = SleepMark(until_woken)

    def role_marks(self, role: str, tags: Collection[str]) -> dict[Mark, SleepMark]:
        """Return a role's marks for these tags."""
        return {mark: slept for mark, slept in list(self.marks.items()) if mark[0] == role and mark[1] in tags}

    def call_marks(self, role: str, tags: Collection[str]) -> dict[Mark, SleepMark]:
        """Return a role's marks for memory that a call must wake first."""
        return {mark: slept for mark, slept in self.role_marks(role, tags).items() if not slept.until_woken}

    @property
    def tags_until_woken(self) -> dict[str, list[str]]:
        """For each role, the tags of sleeping memory that calls don't wake."""
        tags: dict[str, list[str]] = {}
        for (role, tag), slept in list(self.marks.items()):
            if slept.until_woken:
                tags.setdefault(role, []).append(tag)
        return tags

    def remove_marks(self, seen: dict[Mark, SleepMark]) -> None:
        """Remove marks after a wake, except marks that a later sleep has renewed."""
        with self._lock:
            for mark, slept in seen.items():
                if self.marks.get(mark) is slept:
                    del self.marks[mark]

    def clear_marks(self) -> None:
        """Remove all marks, because all roles were constructed again."""
        with self._lock:
            self.marks.clear()

"""The roles of a group that may have sleeping memory: the workers know exactly, the driver errs on the safe side."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import TypeAlias

import attrs

Mark: TypeAlias = tuple[str, str]
"""A role and a tag of its memory."""


@attrs.frozen(eq=False)
class Slept:
    """A mark for one sleep of a role; compared by identity."""

    until_woken: bool = False  # whether calls leave the memory asleep


class Sleepers:
    """Marks for memory that may sleep. A call of a marked role is sent behind a wake, or fails (`until_woken`).

    A mark is made before a sleep is sent and renewed afterwards, and a wake removes only marks that it has seen. So in
    a race a mark stays too long at worst.
    """

    def __init__(self) -> None:
        self.marks: dict[Mark, Slept] = {}  # by role and tag
        self._lock = threading.Lock()  # held while marks change

    def mark(self, role: str, tags: Iterable[str], until_woken: bool) -> None:
        """Mark memory that is about to sleep, or was told to."""
        with self._lock:
            for tag in tags:
                self.marks[role, tag] = Slept(until_woken)

    def seen(self, role: str, tags: Collection[str]) -> dict[Mark, Slept]:
        """Return the marks of a role."""
        return {mark: slept for mark, slept in list(self.marks.items()) if mark[0] == role and mark[1] in tags}

    def for_call(self, role: str, tags: Collection[str]) -> dict[Mark, Slept]:
        """Return the marks of a role for which a call sends a wake."""
        return {mark: slept for mark, slept in self.seen(role, tags).items() if not slept.until_woken}

    @property
    def until_woken(self) -> dict[str, list[str]]:
        """Return the tags that calls leave asleep, by role."""
        tags: dict[str, list[str]] = {}
        for (role, tag), slept in list(self.marks.items()):
            if slept.until_woken:
                tags.setdefault(role, []).append(tag)
        return tags

    def woken(self, seen: dict[Mark, Slept]) -> None:
        """Remove the marks that a wake has seen, except marks renewed by a later sleep."""
        with self._lock:
            for mark, slept in seen.items():
                if self.marks.get(mark) is slept:
                    del self.marks[mark]

    def renew(self) -> None:
        """Remove all marks: the roles were constructed anew."""
        with self._lock:
            self.marks.clear()

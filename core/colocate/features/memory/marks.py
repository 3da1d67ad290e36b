"""Which roles of a group may have memory that sleeps: the workers know, and the driver errs on the safe side."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import TypeAlias

import attrs

Mark: TypeAlias = tuple[str, str]
"""A role and a tag of its memory."""


@attrs.frozen(eq=False)
class Slept:
    """A note that a role was put to sleep, once."""

    until_woken: bool = False  # whether calls leave it asleep


class Sleepers:
    """Marks for what may sleep. A call whose role has some is sent behind a call that wakes it, or fails of them.

    A mark is made before a sleep is sent and renewed after that, and what has been woken takes away only marks that it
    has seen: whatever comes between, a mark stays too long at worst.
    """

    def __init__(self) -> None:
        self.marks: dict[Mark, Slept] = {}  # the marks
        self._lock = threading.Lock()  # held while marks change

    def mark(self, role: str, tags: Iterable[str], until_woken: bool) -> None:
        """Mark what is about to sleep, or has been told to."""
        with self._lock:
            for tag in tags:
                self.marks[role, tag] = Slept(until_woken)

    def seen(self, role: str, tags: Collection[str]) -> dict[Mark, Slept]:
        """Return the marks that a role has."""
        return {mark: slept for mark, slept in list(self.marks.items()) if mark[0] == role and mark[1] in tags}

    def for_call(self, role: str, tags: Collection[str]) -> dict[Mark, Slept]:
        """Return those of which a call of the role wakes it."""
        return {mark: slept for mark, slept in self.seen(role, tags).items() if not slept.until_woken}

    @property
    def until_woken(self) -> dict[str, list[str]]:
        """The tags that calls leave asleep, by role."""
        found: dict[str, list[str]] = {}
        for (role, tag), slept in list(self.marks.items()):
            if slept.until_woken:
                found.setdefault(role, []).append(tag)
        return found

    def woken(self, seen: dict[Mark, Slept]) -> None:
        """Forget marks of what a call has woken that was made when these were there."""
        with self._lock:
            for mark, slept in seen.items():
                if self.marks.get(mark) is slept:
                    del self.marks[mark]

    def renew(self) -> None:
        """Forget all: the roles have been made anew."""
        with self._lock:
            self.marks.clear()

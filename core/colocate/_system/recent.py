"""Which part of the last seconds something was busy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

RECENT_S = 10.0
"""Of so much time the busy share is told."""
_MOST = 20_000

Key = TypeVar("Key", bound=Hashable)


class RecentSpans(Generic[Key]):
    """Spans of the last seconds, by whose they are. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: deque[tuple[Key, float, float]] = deque(maxlen=_MOST)

    def add(self, key: Key, start: float, end: float) -> None:
        """One has ended; both in seconds of time.time()."""
        with self._lock:
            self._spans.append((key, start, end))

    def shares(self, now: float) -> dict[Key, float]:
        """The part of the last seconds that was spent, by whose it was."""
        since = now - RECENT_S
        found: dict[Key, float] = {}
        with self._lock:
            while self._spans and self._spans[0][2] < since:
                self._spans.popleft()
            spans = list(self._spans)
        for key, start, end in spans:
            found[key] = found.get(key, 0.0) + max(0.0, end - max(start, since)) / RECENT_S
        return found

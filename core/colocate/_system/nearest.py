"""Suggest valid names for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def find_nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(names), 1, cutoff)), None)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a "did you mean" question with the nearest name, for the end of a message; empty if no name is near."""
    near = find_nearest(name, names)
    return f"; did you mean {near!r}?" if near else ""

"""Which part of the last seconds something was busy."""

from __future__ import annotations

from colocate._system.recent import RecentSpans


def test_what_has_not_ended() -> None:
    """Who has run for a minute isn't idle."""
    spans = RecentSpans[str]()
    spans.add("critic", 94.0, 95.0)
    assert spans.shares(100.0, [("actor", 40.0, 100.0), ("critic", 98.0, 99.0), ("reward", 80.0, 89.0)]) == {
        "actor": 1.0,
        "critic": 0.2,
    }
    assert spans.ends() == {"critic": 95.0}

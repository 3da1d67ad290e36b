"""Processes that the kernel has killed for lack of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocate._system import room
from colocate._system.room import OomKills


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of what the kernel shows: one control group, in another one."""
    (tmp_path / "jobs" / "mine").mkdir(parents=True)
    monkeypatch.setattr(room, "_COUNTS", tmp_path / "vmstat")
    monkeypatch.setattr(room, "_control_groups", lambda: [tmp_path / "jobs" / "mine", tmp_path / "jobs", tmp_path])
    return tmp_path


def count(path: Path, number: int) -> None:
    path.write_text(f"low 0\nmax 7\noom 3\noom_kill {number}\n")


def test_of_the_control_group(machine: Path) -> None:
    """What others of the machine have lost isn't told."""
    events = machine / "jobs" / "mine" / "memory.events"
    count(events, 2)
    count(machine / "vmstat", 5)
    before = OomKills.now()
    count(machine / "vmstat", 6)
    assert before.since() is None
    count(events, 3)
    whom = "a process of its control group"
    said = f"since it was started the kernel has killed {whom} for lack of memory (oom_kill in {events})"
    assert before.since() == said
    count(events, 4)
    assert (before.since() or "").startswith(
        "since it was started the kernel has killed 2 processes of its control group"
    )


def test_of_the_machine(machine: Path) -> None:
    """Where the control group has no count, as in cgroup v1."""
    count(machine / "vmstat", 5)
    before = OomKills.now()
    assert before.since() is None
    count(machine / "vmstat", 6)
    assert "killed a process of this machine" in (before.since() or "")
    count(machine / "jobs" / "mine" / "memory.events", 9)  # another count says nothing of this one
    assert before.since() is None


@pytest.mark.parametrize("text", [None, "pgfault 12\n", "oom_kill many\n"])
def test_where_nobody_counts(machine: Path, text: str | None) -> None:
    if text is not None:
        (machine / "vmstat").write_text(text)
    before = OomKills.now()
    assert before.number == 0
    assert before.since() is None


def test_here() -> None:
    """Linux has counted since 4.13."""
    assert OomKills.now().whose != "nobody"

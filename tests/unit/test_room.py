"""Free memory within control groups, and processes that the kernel has killed for lack of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocate._system import room
from colocate._system.room import OomKills, read_free_memory

MIB = 1 << 20


class Machine:
    """A copy of the kernel's files, with this process in a control group `mine` inside `jobs`."""

    def __init__(self, path: Path, unified: bool) -> None:
        self.root = path / "cgroup" if unified else path / "cgroup" / "memory"
        self.mine = self.root / "jobs" / "mine"
        self.mine.mkdir(parents=True)
        self.counts = path / "vmstat"
        self.events = self.mine / ("memory.events" if unified else "memory.oom_control")
        self.unified = unified
        own = "0::/jobs/mine\n" if unified else "4:cpu,cpuacct:/other\n3:memory:/jobs/mine\n0::/\n"
        (path / "own").write_text(own)

    def limit(self, folder: Path, most: str, used: int, files: int) -> None:
        names = ("max", "current", "") if self.unified else ("limit_in_bytes", "usage_in_bytes", "total_")
        (folder / f"memory.{names[0]}").write_text(f"{most}\n")
        (folder / f"memory.{names[1]}").write_text(f"{used}\n")
        stat = f"anon 1\n{names[2]}inactive_file {files}\n{names[2]}active_file 0\n"
        (folder / "memory.stat").write_text(stat)


@pytest.fixture(params=[True, False], ids=["v2", "v1"])
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Simulate control groups of one version."""
    machine = Machine(tmp_path, request.param)
    monkeypatch.setattr(room, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(room, "_OWN", tmp_path / "own")
    monkeypatch.setattr(room, "_COUNTS", machine.counts)
    return machine


def test_free_memory_respects_group_limits(machine: Machine) -> None:
    """Free memory is the least that the own control group and those around it leave; file caches count as free."""
    machine.limit(machine.mine, "max" if machine.unified else "9223372036854771712", 30 * MIB, 0)
    assert read_free_memory() > 100 * MIB
    machine.limit(machine.mine, str(50 * MIB), 30 * MIB, 5 * MIB)
    assert read_free_memory() == 25 * MIB
    machine.limit(machine.root / "jobs", str(40 * MIB), 35 * MIB, 0)
    assert read_free_memory() == 5 * MIB
    machine.limit(machine.root, str(40 * MIB), 45 * MIB, 0)
    assert read_free_memory() == 0


def count(path: Path, number: int) -> None:
    path.write_text(f"low 0\nmax 7\noom 3\noom_kill {number}\n")


def test_killed_of_the_control_group(machine: Machine) -> None:
    """Kills count in the own control group only; in a container its files are those at the root."""
    for events in (machine.root / machine.events.name, machine.events):
        count(events, 2)
        count(machine.counts, 5)
        before = OomKills.read_now()
        count(machine.counts, 6)
        assert before.describe_since() is None
        count(events, 3)
        whom = "a process of its control group"
        said = f"since it was started the kernel has killed {whom} for lack of memory (oom_kill in {events})"
        assert before.describe_since() == said
        count(events, 4)
        assert "has killed 2 processes of its control group" in (before.describe_since() or "")


def test_killed_of_the_machine(machine: Machine) -> None:
    """Kills of the machine count if the control group has no count."""
    count(machine.counts, 5)
    before = OomKills.read_now()
    assert before.describe_since() is None
    count(machine.counts, 6)
    assert "killed a process of this machine" in (before.describe_since() or "")
    count(machine.events, 9)  # a count that appears later isn't compared
    assert before.describe_since() is None

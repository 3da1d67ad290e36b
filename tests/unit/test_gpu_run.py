"""How tests/gpu gets to a machine with a GPU, and what comes back from there."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from tests.gpu import run, wheels

ROOT = run.ROOT


def test_versions_are_pinned() -> None:
    """What is gathered has the versions that everything else is tested with."""
    pinned = {run._plain(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = list(wheels.requirements(wheels.REQUIREMENTS.read_text()))
    assert len(names) > 30
    assert {run._plain(name) for name in names} <= pinned


# What such a machine has for certain, with all that this needs; but for matplotlib, which is too large to travel: the
# tasks of the ppo plugin import what draws, and where it isn't there their tests are skipped.
THERE = ("torch", "transformers", "attrs", "pluggy", "psutil", "typer", "rich", "pytest", "hypothesis", "matplotlib")


def needs(name: str) -> set[str]:
    """What a distribution needs on that machine."""
    there = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
    try:
        found = map(Requirement, importlib.metadata.requires(name) or [])
    except importlib.metadata.PackageNotFoundError:  # the Python that runs this does without
        return set()
    return {run._plain(need.name) for need in found if need.marker is None or need.marker.evaluate(there)}


def test_nothing_is_missing() -> None:
    """What the wheels need is among them, or comes with what the machine has."""
    present: set[str] = set()
    todo = set(THERE)
    while todo:
        present |= todo
        todo = {need for name in todo for need in needs(name)} - present
    listed = {run._plain(name) for name in wheels.requirements(wheels.REQUIREMENTS.read_text())}
    wanted = {run._plain(name) for name in needs("colocate")} | {"distributed", "ray", "tensordict", "reasoning-gym"}
    wanted |= {need for name in listed for need in needs(name)}
    assert wanted - listed - present == set()


def test_the_checkout_is_installed(tmp_path: Path) -> None:
    """With the version, the entry points and the packages that pip would give it."""
    run.link(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    real = importlib.metadata.distribution("colocate")
    assert (found.name, found.version) == (real.name, real.version)
    points = {(point.group, point.name, point.value) for point in found.entry_points}
    assert points == {(point.group, point.name, point.value) for point in real.entry_points}
    assert (found.read_text("top_level.txt") or "").split() == sorted(
        [
            *("colocate", "colocate_run", "colocate_report", "colocate_local", "colocate_ray", "colocate_dask"),
            *("colocate_ppo", "colocate_rollout", "colocate_observers", "colocate_verl"),
        ]
    )
    assert [Path(line).name for line in (tmp_path / "colocate.pth").read_text().splitlines()] == [*run.SOURCES]


def test_the_page_lists_the_areas() -> None:
    """docs/gpu.md has a row for each class of tests, and each is in one of the parts: these runs are all there is."""
    listed = re.findall(r"^\| `(Test\w+)` \|", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE)
    files = ("test_gpu.py", "test_figures.py", "test_addresses.py")
    tests = "".join((ROOT / "tests/gpu" / name).read_text() for name in files)
    assert listed == re.findall(r"^class (Test\w+)", tests, re.MULTILINE)
    assert sorted(area for areas in run.PARTS.values() for area in areas) == sorted(listed)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    """With --allow-cpu, all that needs no CUDA passes on slots of the CPU, and the rest says what it needs."""
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    command = [sys.executable, "-m", "tests.gpu.run", "--allow-cpu", "--wheels", str(tmp_path), "--out", str(tmp_path)]
    command += ["--", "--basetemp", str(tmp_path / "pytest")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    record = json.loads((tmp_path / "gpu.json").read_text())
    outcomes = Counter(test["outcome"] for test in record["tests"])
    assert (done.returncode, record["device"]) == (0, None), done.stdout[-6000:]
    assert (outcomes["failed"], outcomes["passed"] > 100) == (0, True), outcomes
    skipped = {test["reason"] for test in record["tests"] if test["outcome"] == "skipped"}
    no_threads = "executor 'local' keeps its slots in the driver's own process, which can't vanish"
    assert skipped == {"needs CUDA", "its slots are processes", no_threads}
    assert "no GPU (--allow-cpu)" in (tmp_path / "gpu.md").read_text()

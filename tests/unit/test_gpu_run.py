"""How tests/gpu gets to a machine with a GPU, and what comes back from there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

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
    found = map(Requirement, importlib.metadata.requires(name) or [])
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


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("cattrs-26.2.1-py3-none-any.whl", True),
        ("locket-1.0.0-py2.py3-none-any.whl", True),
        ("orjson-3.13.0-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("tornado-6.6.1-cp311-abi3-manylinux1_x86_64.whl", True),
        ("pycosat-0.6.6-cp311-cp311-linux_x86_64.whl", False),
        ("orjson-3.13.0-cp312-cp312-manylinux_2_17_aarch64.whl", False),
    ],
)
def test_wheels_are_for_that_machine(name: str, fits: bool) -> None:
    assert wheels._fits(name, "3.12") is fits


def test_parts_of_a_wheel_are_left_out(tmp_path: Path) -> None:
    """The rest, and its record, are as they were."""
    wheel = tmp_path / "ray-1-py3-none-any.whl"
    record = "ray/__init__.py,sha256=x,1\nray/jars/ray.jar,sha256=y,2\nray-1.dist-info/RECORD,,\n"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in (("ray/__init__.py", "a"), ("ray/jars/ray.jar", "b"), ("ray-1.dist-info/RECORD", record)):
            file.writestr(name, text)
    wheels.trim(wheel, ("ray/jars/",))
    with zipfile.ZipFile(wheel) as file:
        assert file.namelist() == ["ray/__init__.py", "ray-1.dist-info/RECORD"]
        assert "jars" not in file.read("ray-1.dist-info/RECORD").decode()
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


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
            *("colocate_ppo", "colocate_observers"),
        ]
    )
    assert [Path(line).name for line in (tmp_path / "colocate.pth").read_text().splitlines()] == [*run.SOURCES]


def test_a_machine_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told in a line what is missing, and that there is no GPU."""
    monkeypatch.setattr(run, "_LOOK", "import torch_of_nobody")
    facts = run.look(tmp_path)
    assert facts["device"] is None
    assert facts["torch"] == "can't be used (ModuleNotFoundError: No module named 'torch_of_nobody')"


def result(test: str, outcome: str, reason: str = "", **figures: str) -> dict[str, Any]:
    area = test.partition("::")[0]
    return {"test": test, "area": area, "outcome": outcome, "seconds": 1.4, "reason": reason, "figures": figures}


def test_a_section_for_the_page() -> None:
    """It says when, where, of which commit, and what came out."""
    record = {
        "date": "2026-12-01 10:00 UTC",
        "device": "1 x NVIDIA H100, 79 GiB",
        "commit": "abc1234",
        "sources": "0123",
        "python": "3.12.3",
        "torch": "2.11.0",
        "cuda": "13.0",
        "driver": "580",
        "seconds": 61.0,
        "exit": 1,
        "tests": [
            result("TestWork::test_a", "passed", copies="40 GB/s"),
            result("TestWork::test_b", "failed", "AssertionError: no"),
            result("TestCore::test_c", "skipped", "NVML tells no UUIDs here"),
        ],
    }
    assert run.section(record) == (
        "### 2026-12-01 10:00 UTC: 1 x NVIDIA H100, 79 GiB\n\n"
        "Commit abc1234 (sources 0123), Python 3.12.3, torch 2.11.0, CUDA 13.0, driver 580: "
        "1 passed, 1 failed, 1 skipped in 61 s.\n\n"
        "| area | passed | failed | skipped | seconds |\n| --- | --- | --- | --- | --- |\n"
        "| TestWork | 1 | 1 | 0 | 3 |\n| TestCore | 0 | 0 | 1 | 1 |\n\n"
        "| figure | value |\n| --- | --- |\n| copies | 40 GB/s |\n\n"
        "- failed: `TestWork::test_b`: AssertionError: no\n\n"
        "- skipped: NVML tells no UUIDs here\n"
    )
    late = run.section({**record, "device": None, "tests": [], "exit": "time was up"})
    assert "no GPU (--allow-cpu)" in late
    assert "no test has ended in 61 s (time was up)." in late


def test_whose_commit_it_is(tmp_path: Path) -> None:
    """That for which the wheels were gathered, if the sources are those: what git says there may be another one."""
    (tmp_path / "commit").write_text(f"abc1234 {run.digest()}\n")
    assert run._commit(tmp_path) == "abc1234"
    (tmp_path / "commit").write_text("abc1234 0123\n")
    assert run._commit(tmp_path) != "abc1234"


def test_most_go_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the others after them, where pytest can do that; what went wrong in either is told; no tests are no fault."""
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert run.waves() == [[]]
    monkeypatch.undo()
    assert [wave[:2] for wave in run.waves()] == [["-m", "not alone"], ["-m", "alone"]]
    for codes, expected in (
        ([0, 0], 0),
        ([0, 5], 0),
        ([5, 0], 0),
        ([5, 5], 5),
        ([1, 0], 1),
        ([0, "time was up"], "time was up"),
    ):
        left = list(codes)
        monkeypatch.setattr(run, "_pytest", lambda *_, left=left: left.pop(0))
        assert run.run(Path("python"), tmp_path, [], 1.0, cpu=True) == (expected, [])


def test_results_of_parts_are_one() -> None:
    """Of one machine and the same sources; whether each went well is told."""
    one = {"device": "H100", "sources": "0123", "seconds": 60.5, "exit": 0, "tests": [result("A::a", "passed")]}
    other = {**one, "seconds": 30.0, "exit": 1, "tests": [result("B::b", "failed")]}
    found = run.joined([one, other])
    assert (found["seconds"], found["exit"], found["device"]) == (90.5, 1, "H100")
    assert [test["test"] for test in found["tests"]] == ["A::a", "B::b"]
    assert run.joined([other, {**one, "exit": "time was up"}])["exit"] == "time was up"
    assert run.joined([one, one])["exit"] == 0
    with pytest.raises(SystemExit, match="their sources is 0123 and 4567"):
        run.joined([one, {**other, "sources": "4567"}])


def test_each_area_is_in_a_part() -> None:
    """So that three runs are all there is."""
    listed = re.findall(r"^\| `(Test\w+)` \|", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE)
    assert sorted(area for areas in run.PARTS.values() for area in areas) == sorted(listed)


def test_what_is_noted_of_a_test(tmp_path: Path) -> None:
    """Each test is noted when it has ended, with its figures, or why it failed or was skipped."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/gpu/conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "class TestArea:\n"
        "    def test_one(self, record_property): record_property('speed', 'fast')\n"
        "    def test_two(self): assert 1 == 2\n"
        "def test_three(): pytest.skip('no such thing')\n"
    )
    notes = tmp_path / "notes"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]
    subprocess.run(command, env={"COLOCATE_GPU_RESULTS": str(notes), "PATH": ""}, capture_output=True, check=False)
    found = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [(line["area"], line["outcome"], line["reason"]) for line in found] == [
        ("TestArea", "passed", ""),
        ("TestArea", "failed", "assert 1 == 2"),
        ("test_some", "skipped", "no such thing"),
    ]
    assert found[0]["figures"] == {"speed": "fast"}


def test_the_page_lists_the_areas() -> None:
    """docs/gpu.md has a row for each class of tests."""
    listed = re.findall(r"^\| `(Test\w+)` \|", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE)
    files = ("test_gpu.py", "test_figures.py", "test_addresses.py")
    tests = "".join((ROOT / "tests/gpu" / name).read_text() for name in files)
    assert listed == re.findall(r"^class (Test\w+)", tests, re.MULTILINE)


@pytest.mark.long
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
    assert {test["reason"] for test in record["tests"] if test["outcome"] == "skipped"} == {"needs CUDA"}
    assert "no GPU (--allow-cpu)" in (tmp_path / "gpu.md").read_text()


def test_they_are_tried_without_a_gpu(tmp_path: Path) -> None:
    """What needs no CUDA runs on the CPU, so that a change which breaks these tests is seen before a machine is had."""
    asked = ["tests/gpu/test_gpu.py", "-k", "test_forks_of_a_template or test_a_resident_stays or test_keep_and_fetch"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}", *asked]
    env = {**os.environ, "COLOCATE_GPU_DRY": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    assert re.search(r"^[3-9] passed", done.stdout.splitlines()[-1]), done.stdout

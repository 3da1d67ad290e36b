"""The log file of each worker, and `colocate logs`."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from tests.cli.conftest import CommandLine

import colocate as colocate_module
from colocate import Role, method
from colocate.executor import Boot
from colocate.testing.waiting import wait_until
from colocate_run import logs
from colocate_run.logs import WorkerLogs, list_logs

CONFIG = """
    executor: {use: local, with: {processes: PROCESSES}}
    pools: {main: {slots: 2}}
    groups:
      policy: {pool: main, roles: {talker: {use: "talk:Talker"}, quiet: {use: "talk:Talker", slots: [1]}}}
    job: {use: "talk:job"}
"""
TALK = """
    import os, sys, time
    import colocate

    class Talker(colocate.Role):
        def __init__(self):
            print(f"here I am, {self.ctx.role} {self.ctx.rank}")

        @colocate.method
        def say(self, text):
            print(text)
            sys.stderr.write("half ")
            sys.stderr.write("a line\\n")
            print("10 %\\r50 %\\r100 %")

        @colocate.method
        def below(self):
            os.write(2, b"from below\\n")

    def job(run):
        talker = run.groups["policy"].role("talker")
        talker.say("good morning")
        run.log(1, reward=1.0)
        while not os.path.exists("go on"):
            time.sleep(0.05)
        if not run.stopping:
            talker.say("good night")
"""
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "


def texts(path: Path) -> list[str]:
    """Return the lines of a log without times and without header lines."""
    found = path.read_text().splitlines()
    assert all(re.match(STAMP, line) for line in found)
    return [line[24:] for line in found if line[24:26] != "--"]


def ready(colocate: CommandLine, processes: bool, *, ends: bool = True) -> None:
    """Write a job that waits for a file; with `ends`, the file exists."""
    colocate.write("talk.py", TALK)
    colocate.write("demo.yaml", CONFIG.replace("PROCESSES", str(processes).lower()))
    if ends:
        colocate.write("go on", "")


@pytest.mark.in_make_test("processes")
@pytest.mark.parametrize("processes", [True, False], ids=["processes", "threads"])
def test_each_worker_has_a_file(colocate: CommandLine, processes: bool) -> None:
    """A worker's log file has all its lines with their role and rank, and `colocate logs` selects lines."""
    ready(colocate, processes)
    done = colocate("run", "demo.yaml")
    assert done.returncode == 0, done.stderr
    folder = colocate.folder / "runs" / "demo" / "logs"
    assert sorted(path.name for path in folder.iterdir()) == ["policy-0.txt", "policy-1.txt"]
    for slot in range(2):
        said = [f"[talker {slot}] {text}" for text in ("good morning", "half a line", "100 %")]
        said += [line.replace("morning", "night") for line in said]
        others = ["[quiet 0] here I am, quiet 0"] if slot else []
        assert texts(folder / f"policy-{slot}.txt") == [f"[talker {slot}] here I am, talker {slot}", *others, *said]
    shown = colocate("logs", "runs/demo", "--rank", "1", "--group", "policy").stdout
    assert shown == (folder / "policy-1.txt").read_text()
    of_role = colocate("logs", "runs/demo", "--role", "quiet", "--rank", "0").stdout
    assert re.fullmatch(rf"\[policy/1\] {STAMP}\[quiet 0\] here I am, quiet 0\n", of_role)
    nobody = colocate("logs", "runs/demo", "--role", "talker", "--rank", "2")
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "has no line that role 'talker', rank 2, has printed" in nobody.stderr
    both = colocate("logs", "runs/demo", "-n", "0").stdout.splitlines()
    assert len(both) == sum(len(path.read_text().splitlines()) for path in folder.iterdir())
    times = [re.sub(r"^\[policy/.\] ", "", line)[:23] for line in both]
    assert times == sorted(times)
    assert len(colocate("logs", "runs/demo", "--lines", "3").stdout.splitlines()) == 3


def test_missing_folder_and_rank_are_refused(colocate: CommandLine) -> None:
    """`colocate logs` fails for a folder that doesn't exist, and for an unknown rank."""
    ready(colocate, processes=True)
    assert colocate("run", "demo.yaml").returncode == 0
    none = colocate("logs", "runs/dema")
    assert (none.returncode, "there is no such folder" in none.stderr) == (1, True)
    other = colocate("logs", "runs/demo", "--rank", "7")
    assert (other.returncode, "there are policy/0 and policy/1" in other.stderr) == (1, True)


def test_follow(colocate: CommandLine) -> None:
    """`colocate logs --follow` shows old and new lines until the run ends; Ctrl-C ends it without a traceback."""
    ready(colocate, processes=True, ends=False)
    run = colocate.start("run", "demo.yaml")
    folder = colocate.folder / "runs" / "demo"
    wait_until(lambda: (folder / "logs" / "policy-1.txt").exists(), "the worker has printed")
    wait_until(lambda: "morning" in (folder / "logs" / "policy-1.txt").read_text(), "it has said good morning")
    for given in "demo", str(run.pid), f"{run.pid}/1":
        assert "morning" in colocate("logs", given, "--rank", "1").stdout
    follows = colocate.start("logs", "runs/demo", "--rank", "1", "--follow")
    other = colocate.start("logs", "runs/demo", "--follow")
    assert other.stdout is not None
    while "morning" not in other.stdout.readline():
        pass
    other.send_signal(signal.SIGINT)
    assert "Traceback" not in other.communicate(timeout=60)[1]  # communicate() also closes the pipes
    colocate.write("go on", "")
    assert run.wait(timeout=60) == 0
    output, error = follows.communicate(timeout=60)
    assert (follows.returncode, error) == (0, "")
    assert [line.split("] ")[-1] for line in output.splitlines() if "good" in line] == ["good morning", "good night"]
    run.communicate()


def boot(slot: int, generation: int = 0) -> Boot:
    return Boot(worker=f"r/policy/{slot}", group="policy", slot=slot, node="n", device="cpu", generation=generation)


def test_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log file that is too large gets a number, the oldest are deleted, and the remaining lines have no gap."""
    monkeypatch.setattr(logs, "MOST_BYTES", 300)
    found = WorkerLogs(tmp_path)
    for number in range(200):
        found.on_line(boot(0), "actor 0", f"line {number}")
        time.sleep(0.001)
    found.close()
    files = list_logs(tmp_path)
    assert {(each.group, each.slot) for each in files} == {("policy", 0)}
    # The last written lines may have filled their file, which then has a number.
    assert [each.older for each in files] in ([3, 2, 1, 0], [3, 2, 1])
    lines = [int(text.split()[-1]) for each in files for text in texts(each.path)]
    assert lines == [*range(lines[0], 200)]
    assert all(each.path.stat().st_size < 20_000 for each in files)


def test_log_keeps_last_progress_bar_state(tmp_path: Path) -> None:
    """The log keeps a progress bar's last state, even if the worker ends amid it, and marks a restart."""
    found = WorkerLogs(tmp_path)
    for text in ("1 %\r", "50 %\r", "100 %"):
        found.on_line(boot(0), "actor 0", text)
    found.on_line(boot(0, generation=1), None, "again")
    found.on_line(boot(0, generation=1), "actor 0", "7 %\r")
    found.close()
    assert texts(tmp_path / "logs" / "policy-0.txt") == ["[actor 0] 100 %", "again", "[actor 0] 7 %"]
    assert ", after 1 restarts" in (tmp_path / "logs" / "policy-0.txt").read_text()
    found.on_line(boot(0), None, "too late")
    assert "too late" not in (tmp_path / "logs" / "policy-0.txt").read_text()


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    """A log folder that can't be written ends the logs with a recorded fault, and raises nothing."""
    (tmp_path / "logs").write_text("a file")
    found = WorkerLogs(tmp_path)
    found.on_line(boot(0), None, "hello")
    found.close()
    assert found.fault is not None
    assert "logs" in found.fault


class Speaker(Role):
    @method
    def say(self, text: str) -> None:
        print(text)


def test_recorded_script_writes_worker_logs(tmp_path: Path) -> None:
    """`colocate.record` writes worker logs from its block on, with the last lines before the block."""
    with colocate_module.connect(processes=True) as runtime, runtime.reserve() as pool:
        speaker = pool.spawn({"speaker": colocate_module.role(Speaker)}, name="g").role("speaker", Speaker)
        speaker.say("before")
        wait_until(lambda: bool(runtime._node.worker_groups["g"].workforce.workers[0].last_lines), "it has come")
        with colocate_module.record(runtime, tmp_path / "run"):
            speaker.say("amid")
            path = tmp_path / "run" / "logs" / "g-0.txt"
            wait_until(lambda: path.exists() and "amid" in path.read_text(), "it is written")
        speaker.say("behind")
        with colocate_module.record(runtime, tmp_path / "run"):
            speaker.say("again")
            path = tmp_path / "run-2" / "logs" / "g-0.txt"
            wait_until(lambda: path.exists() and "again" in path.read_text(), "it is written")
    assert texts(tmp_path / "run" / "logs" / "g-0.txt") == ["before", "[speaker 0] amid"]


ALIKE = """
    import os, sys
    import colocate

    class Talker(colocate.Role):
        @colocate.method
        def say(self):
            print("all of us")
            print("twice")
            print("twice")
            print(f"rank {self.ctx.rank}")
            print(f"[W1201 01:16:34.96{self.ctx.rank} socket.cpp:207] a warning with a time", file=sys.stderr)

    def job(run):
        run.groups["policy"].role("talker").say()
"""


def test_equal_lines_of_ranks_are_shown_once(colocate: CommandLine) -> None:
    """A run shows equal lines of several ranks as often as one rank printed them; the log files keep all lines."""
    colocate.write("talk.py", ALIKE)
    colocate.write(
        "demo.yaml",
        """
        executor: {use: local, with: {processes: true}}
        pools: {main: {slots: 3}}
        groups: {policy: {pool: main, roles: {talker: "talk:Talker"}}}
        job: talk:job
        """,
    )
    done = colocate("run", "demo.yaml")
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stderr.splitlines() if line.startswith("[policy/talker ")]
    assert sorted(line for line in lines if "warning" not in line) == [
        "all of us",
        "rank 0",
        "rank 1",
        "rank 2",
        "twice",
        "twice",
    ]
    assert sum("a warning with a time" in line for line in lines) == 1
    for slot in range(3):
        assert len(texts(colocate.folder / "runs" / "demo" / "logs" / f"policy-{slot}.txt")) == 5


def test_equal_lines_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal line that comes late is shown: a user may be waiting for that rank's line."""
    equal = logs.EqualLines()
    assert [equal.is_repeated("policy", slot, f"actor {slot}", "here") for slot in (0, 1, 1, 0)] == [
        False,
        True,
        False,
        True,
    ]
    assert not equal.is_repeated("other", 0, "actor 0", "here")
    assert not equal.is_repeated("policy", 0, "critic 0", "here")
    monkeypatch.setattr(logs, "EQUAL_WITHIN_S", 0.0)
    time.sleep(0.001)
    assert not equal.is_repeated("policy", 1, "actor 1", "here")

"""`colocate top` shows the calls of a running job, and changes nothing."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from rich.console import Console
from tests.cli.conftest import CommandLine

import colocate as library
from colocate._system.recent import RECENT_S
from colocate.features.looking import glance
from colocate.testing.gate import Address, Gate, pass_gate
from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate_report.jobs import Job, list_jobs
from colocate_run.cli.cluster import Cluster
from colocate_run.cli.top import _render_page, show_top

JOB = """
import sys
import colocate

class Waiting(colocate.Role):
    @colocate.method
    def wait(self):
        print("waiting", flush=True)
        sys.stdin.readline()

    @colocate.method
    def work(self):
        return 1

def job(run):
    group = run.groups["policy"]
    with group.pipeline():  # one message: when the first one says that it waits, the others are there
        calls = [group["waiting"].wait.submit(), group["waiting"].work.submit(), group["other"].work.submit()]
    colocate.wait(calls)
"""
CONFIG = """
pools: {main: {slots: 1}}
groups: {policy: {pool: main, roles: {waiting: "beside:Waiting", other: "beside:Waiting"}}}
job: beside:job
"""


@pytest.fixture
def running(colocate: CommandLine) -> Iterator[subprocess.Popen[str]]:
    """Start a job that waits in a call, with two more calls queued; it is the second run of its config."""
    colocate.write("beside.py", JOB)
    (colocate.folder / "runs" / "watched").mkdir(parents=True)
    colocate.write("watched.yaml", CONFIG)
    job = colocate.start("run", "watched.yaml", stdin=True)
    assert job.stdout is not None
    while "waiting" not in (line := job.stdout.readline()):
        assert line, job.communicate()[1]
    yield job
    job.kill()
    job.communicate()


class Waiting(library.Role):
    @library.method
    def wait(self, gate: Address) -> None:
        pass_gate(gate)

    @library.method(dispatch=library.PerRank("gate"))
    def wait_each(self, gate: Address) -> None:
        pass_gate(gate)


def test_since_when_a_call_runs() -> None:
    """A call's age counts from its start, not from its submission behind another call."""
    recent = glance.RecentCalls(lambda group, role, rank: rank)
    with library.connect() as runtime, Gate() as first, Gate() as second:
        runtime.observe(recent)
        group = runtime.reserve().spawn({"waiting": library.role(Waiting)}, name="policy")
        waiting = group.role("waiting", Waiting)
        with group.pipeline():
            ahead, behind = waiting.wait.submit(first.address), waiting.wait.submit(second.address)
        first.wait_for(1)
        first.open()
        ahead.result(PATIENCE_S)
        second.wait_for(1)
        runtime._node.services.flush_observers()
        (told,) = glance.describe_groups(runtime._node, recent)
        (slot,) = told["slots"]
        assert (slot["call"], slot["queue"]) == ("waiting.wait", 0)
        assert 0 <= slot["age"] <= time.time() - recent.get_ends()["policy", "waiting", 0] + 0.001
        recent.add_span(("policy", "", 0), ended := time.time(), ended)  # simulates a function that ran before
        recent.get_shares(ended + 10 * RECENT_S)  # by then all calls are long ago
        (told,) = glance.describe_groups(runtime._node, recent)
        assert 0 <= told["slots"][0]["age"] <= time.time() - ended + 0.001
        second.open()
        behind.result(PATIENCE_S)


def test_a_job_is_seen(colocate: CommandLine, running: subprocess.Popen[str]) -> None:
    """`colocate top`, by name or pid, shows the running call, its age and its queue; the job then ends normally."""
    (found,) = [job for job in list_jobs() if job.pid == running.pid]
    assert found == Job("watched-2", running.pid)
    told = json.loads(colocate("top", str(running.pid), "--json").stdout)
    (group,) = told["groups"]
    (slot,) = group["slots"]
    assert (told["job"], group["group"], group["state"]) == ("watched-2", "policy", "ready")
    assert (slot["call"], slot["queue"]) == ("waiting.wait", 2)
    assert slot["age"] > 0
    assert [(role["role"], role["bytes"]) for role in slot["roles"]] == [("waiting", 0), ("other", 0)]
    assert [role["busy"] > 0 for role in slot["roles"]] == [True, False]  # a call that hasn't ended counts as busy
    shown = colocate("top", str(running.pid))
    assert "waiting.wait" in shown.stdout
    assert "policy (ready)" in shown.stdout
    for name in (
        "watched-2",
        "runs/watched-2",
        "watched",
    ):  # the last name is the config's
        assert colocate("top", name, "--once").returncode == 0
    wrong = colocate("top", "wached-2")
    assert wrong.returncode == 1
    assert "no job is called 'wached-2'" in wrong.stderr
    assert "did you mean 'watched-2'" in wrong.stderr
    assert running.communicate("\n")[1] == ""
    assert running.returncode == 0
    assert not [job for job in list_jobs() if job.pid == running.pid]
    ended = colocate("top", str(running.pid))
    assert ended.returncode == 1


def test_top_waits_for_first_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, `top` waits for a job and shows the first one; with `once` it fails if no job runs."""
    looks: list[list[Job]] = [[], [], [Job("demo", 7)], [Job("demo", 7)]]
    shown: list[str] = []
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    module = sys.modules[show_top.__module__]
    monkeypatch.setattr(module, "console", lambda: terminal)
    monkeypatch.setattr(module, "list_jobs", lambda: looks.pop(0))
    monkeypatch.setattr(module, "_show_view", lambda sight, *how: shown.append(sight.name))
    assert show_top(None, Cluster(), once=False, every=0.0, json=False) == 0
    assert (shown, looks) == (["demo"], [])
    assert isinstance(terminal.file, io.StringIO)
    assert "no job runs on this machine yet; waiting for one that starts" in terminal.file.getvalue()
    looks.append([])
    assert show_top(None, Cluster(), once=True, every=0.0, json=False) == 1


def test_an_executor_that_there_is_not(colocate: CommandLine) -> None:
    """An unknown `--executor` is refused for its name, not for a missing address."""
    done = colocate("top", "--executor", "rya")
    assert done.returncode == 1
    assert "no executor is called 'rya'" in done.stderr
    assert "did you mean 'ray'?" in done.stderr


def test_a_rank_that_is_ahead() -> None:
    """A rank that has finished its part of a call shows its next call, and counts as busy for that part."""
    recent = glance.RecentCalls(lambda group, role, rank: rank)
    with library.connect() as runtime, Gate() as soon, Gate() as late, Gate() as second:
        runtime.observe(recent)
        group = runtime.reserve(2).spawn({"waiting": library.role(Waiting)}, name="policy")
        waiting, submitted = group.role("waiting", Waiting), time.time()
        with group.pipeline():
            calls = [waiting.wait_each.submit([soon.address, late.address])]  # type: ignore[arg-type]
            calls += [waiting.wait.submit(second.address) for _ in range(2)]
        soon.wait_for(1)
        late.wait_for(1)
        begun = time.time()
        wait_until(lambda: time.time() > begun + 0.5, "it has run for a while")
        opened = time.time()
        soon.open()
        second.wait_for(1)  # rank 0 is in the next call
        (told,) = glance.describe_groups(runtime._node, recent)
        now, (ahead, behind) = time.time(), told["slots"]
        assert (ahead["call"], ahead["queue"], behind["call"], behind["queue"]) == (
            "waiting.wait",
            1,
            "waiting.wait_each",
            2,
        )
        assert 0 <= ahead["age"] <= now - opened + 0.001
        assert opened - begun <= behind["age"] <= now - submitted + 0.001
        for slot in (ahead, behind):
            (role,) = slot["roles"]
            assert (opened - begun) / RECENT_S - 0.001 <= role["busy"] <= (now - submitted) / RECENT_S + 0.001
        late.open()
        second.open()
        library.wait(calls)


@pytest.mark.parametrize(
    ("width", "dropped"),
    [
        (60, "node, device, holds, asleep, busy, queue, for"),
        (80, "node, device, asleep, busy, queue"),
        (140, ""),
    ],
)
def test_a_narrow_terminal(width: int, dropped: str) -> None:
    """A narrow terminal omits the least important columns, and names them."""
    held = [("actor", 5_662_310, 0), ("critic", 0, 1_365_632), ("reference_policy", 1_416_832, 0)]
    shown = narrow(width, held)
    assert max(map(len, shown)) <= width
    missing = re.search(r"\(a wider terminal shows (.*), too\)", " ".join(each.strip() for each in shown))
    assert {*(missing[1] if missing else "").split(", ")} == {*dropped.split(", ")}
    told = {"group": "policy", "role": "reference_policy", "runs": "actor.update_weights", "holds": "5.4 MiB"}
    told |= {"asleep": "1.3 MiB", "busy": "50%", "for": "1.5 s", "node": "worker-17.example", "queue": " 2 "}
    for column, whole in told.items():
        assert any(whole in line for line in shown) == (column not in dropped.split(", ")), column


def narrow(width: int, held: list[tuple[str, int, int]]) -> list[str]:
    """Return the lines that a terminal of this width shows of a job."""
    roles = [{"role": name, "rank": 0, "busy": 0.5, "bytes": here, "asleep": away} for name, here, away in held]
    slot = {"slot": 0, "node": "worker-17.example", "device": "cuda:0", "queue": 2}
    slot |= {"call": "actor.update_weights", "age": 1.5, "roles": roles}
    group = {"group": "policy", "state": "ready", "slots": [slot]}
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(_render_page({"job": "ppo", "node": "n", "pid": 7, "seconds": 3.0, "groups": [group]}, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()

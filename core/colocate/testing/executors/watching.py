"""A job that is looked at by others of its cluster, who find it by its name."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import attrs
import pytest

from colocate import Runtime, wire
from colocate.errors import ConfigError, EngineError
from colocate.executor import Detachable, Watchable, Window
from colocate.testing.executors._base import needs, of_executor
from colocate.testing.executors._detached import TTL_S, DetachedCase, counting, new
from colocate.testing.executors.drivers import Driver, Scripts
from colocate.testing.gate import Gate
from colocate.testing.waiting import wait_until
from colocate_report.cluster_window import look_at
from colocate_run.cli.cluster import Cluster
from colocate_run.cli.top import show_top

_JOB = """
from colocate.testing.probes.counting import Counting

with CONNECT as runtime:
    roles = {"counting": colocate.role(Counting), "other": colocate.role(Counting).on(slots=[0])}
    group = runtime.reserve(2, cpus=0).spawn(roles, name="policy")
    with colocate.record(runtime, NAME):
        with group.pipeline():
            call = group.role("counting", Counting).wait_and_add.submit(GATE)
            group.role("other", Counting).add.submit()
        say(call.result())
        wait()
"""


class Watching(DetachedCase):
    """`colocate top`, from elsewhere."""

    @pytest.fixture
    def job(self) -> str:
        """A name for a job."""
        return f"test-{uuid.uuid4().hex[:8]}"

    @pytest.fixture
    def gate(self) -> Iterator[Gate]:
        """Where its first call waits."""
        with Gate() as gate:
            yield gate

    def begin(self, scripts: Scripts, job: str, gate: Gate) -> Driver:
        """Start it; both slots are in a call when this returns."""
        driver = scripts.start(f"NAME, GATE = {job!r}, {gate.address!r}\n{_JOB}")
        gate.wait_for(2)
        return driver

    @needs(Watchable)
    @of_executor
    def test_looked_at_from_elsewhere(
        self, scripts: Scripts, runtime: Runtime, job: str, gate: Gate, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Another driver sees what runs, for how long, and what waits; the job goes on as if nobody had looked."""
        driver = self.begin(scripts, job, gate)
        window = found(runtime, job)
        assert window is not None
        (group,) = look_at(window, watchable(runtime))["groups"]
        assert (group["group"], group["state"], len(group["slots"])) == ("policy", "ready", 2)
        first, second = group["slots"]
        assert [(each["call"], each["queue"]) for each in (first, second)] == [
            ("counting.wait_and_add", 1),
            ("counting.wait_and_add", 0),
        ]
        assert [role["role"] for role in first["roles"]] == ["counting", "other"]
        assert first["age"] > 0
        for way in window.address.split(","):  # from this machine, and from others
            assert look_at(attrs.evolve(window, address=way), watchable(runtime))["pid"] == driver.process.pid
        assert first["age"] < look_at(window, watchable(runtime))["groups"][0]["slots"][0]["age"]
        with pytest.raises(EngineError, match="can't be reached from here"):
            look_at(attrs.evolve(window, key=wire.new_key()), watchable(runtime))

        config = scripts.folder / "cluster.yaml"
        config.write_text(json.dumps({"executor": {"use": self.executor, "with": dict(self.options)}}))
        cluster = Cluster(config)
        assert show_top(job, cluster, once=True, every=1.0, json=False) == 0
        shown = capsys.readouterr().out
        assert f"{job} (process {driver.process.pid} on " in shown
        assert "counting.wait_and_add" in shown
        assert show_top(f"{job}x", cluster, once=True, every=1.0, json=False) == 1
        said = capsys.readouterr().err
        assert f"no job is called '{job}x'" in said
        assert f"did you mean '{job}'?" in said

        gate.open()
        assert driver.hear() == [1, 1]
        assert driver.end() == (0, "")
        assert found(runtime, job) is None
        with pytest.raises(EngineError, match="can't be reached from here"):
            look_at(window, watchable(runtime))
        assert show_top(job, cluster, once=True, every=1.0, json=False) == 1
        assert "no job " in capsys.readouterr().err

    @needs(Detachable)
    @of_executor
    def test_detached_pool_is_looked_at(
        self, runtime: Runtime, name: str, gate: Gate, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """With a driver and without, by what its workers say: nothing of it changes by that."""
        executor = cast("Detachable", runtime._node.services.executor)
        config = tmp_path / "cluster.yaml"
        config.write_text(json.dumps({"executor": {"use": self.executor, "with": dict(self.options)}}))
        pool, view = new(runtime)
        view.add()
        pool.detach(name, ttl=TTL_S)

        before = executor.look(name)
        seen = executor.look(name)
        assert (seen["driver"], seen["epoch"], seen["silent"], seen["lost"]) == (None, before["epoch"], [], 0)
        assert before["left_s"] >= seen["left_s"]  # nothing was renewed
        workers = sorted(seen["workers"], key=lambda each: int(each["slot"]))
        assert [(each["group"], each["slot"], each["call"], each["queue"]) for each in workers] == [
            ("counting", 0, None, 0),
            ("counting", 1, None, 0),
        ]
        for rank, worker in enumerate(workers):
            (role,) = worker["roles"]
            assert (role["role"], role["rank"], role["asleep"]) == ("counting", rank, 0)
            assert role["bytes"] is not None
        assert show_top(name, Cluster(config), once=True, every=1.0, json=False) == 0
        shown = capsys.readouterr().out
        assert f"{name} (detached pool), it lives " in shown
        assert "counting (detached)" in shown

        with runtime.attach(name) as borrowed:
            with borrowed.groups["counting"].pipeline():
                first = counting(borrowed).wait_and_add.submit(gate.address)
                counting(borrowed).add.submit()
            gate.wait_for(2)
            held = executor.look(name)
            assert held["driver"].startswith(f"driver {os.getpid()} on ")
            assert held["left_s"] is None
            assert [(each["call"], each["queue"]) for each in held["workers"]] == [("counting.wait_and_add", 1)] * 2
            assert all(each["age"] > 0 for each in held["workers"])

            def all_busy() -> bool:
                return all(each["roles"][0]["busy"] > 0 for each in executor.look(name)["workers"])

            wait_until(all_busy, "who runs its first call is busy")
            assert show_top(f"pool/{name}", Cluster(config), once=True, every=1.0, json=True) == 0
            told = json.loads(capsys.readouterr().out)
            assert [group["state"] for group in told["groups"]] == ["attached"]
            gate.open()
            assert first.result() == [2, 2]
            assert counting(borrowed).add() == [4, 4]
            after = executor.look(name)
            assert after["epoch"] == held["epoch"]
            assert all(worker["roles"][0]["busy"] > 0 for worker in after["workers"])
        with pytest.raises(ConfigError, match=f"no pool '{name}x' is detached"):
            executor.look(f"{name}x")

    @of_executor
    def test_who_has_no_windows(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A job of a private engine is seen on its own machine only, which the command says."""
        assert show_top(None, Cluster(executor=self.executor), once=True, every=1.0, json=False) == 1
        assert "which cluster? A private one has no jobs but its driver's" in capsys.readouterr().err


def watchable(runtime: Runtime) -> Watchable:
    """Its executor."""
    return cast("Watchable", runtime._node.services.executor)


def found(runtime: Runtime, name: str) -> Window | None:
    """What the cluster has of a job."""
    return next((each for each in watchable(runtime).windows() if each.name == name), None)

"""Tests of start-up: constructing roles, starting worker processes, and errors during the start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

import colocate
from colocate import ColocatedGroup, RoleSpec, Runtime
from colocate.errors import (
    CapabilityError,
    ClosedError,
    RoleStartError,
    WorkerDied,
)
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature, smoke
from colocate.testing.gate import Gate
from colocate.testing.probes.born import Born
from colocate.testing.probes.early import Early
from colocate.testing.probes.faulty import DiesAtStart, Faulty, HangsAtStart
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, Processes, find_starter
from colocate.worker.birth.template import MODE


class Startup(ExecutorCase):
    """Tests of spawning, which constructs all roles on all ranks, or raises one error that names each rank."""

    def spawn_alone(self, roles: Mapping[str, RoleSpec[Any]], **more: Any) -> ColocatedGroup:
        """Return a group that is spawned with its own runtime."""
        return colocate.spawn(roles, executor=self.executor, **{**self.options, "slots": 2, "cpus": 0, **more})

    @needs_feature("looking")
    def test_in_one_call(self, no_leaks: None) -> None:
        """`colocate.spawn` creates a runtime, a pool and a group, and closing the group closes all three."""
        with self.spawn_alone({"echo": colocate.role(Echo, tag="alone")}, name="alone", seed=7) as group:
            assert group.role("echo", Echo).tag_and_rank() == [("alone", 0), ("alone", 1)]
            pool, runtime = group.owner, group.owner.owner
            assert (runtime.owner, runtime.seed, runtime.groups) == (None, 7, {"alone": group})
            root = runtime.graph.data()
            assert (root["kind"], [child["name"] for child in root["children"]]) == ("runtime", [pool.name])
            assert all("startup.py:" in node["line"] for node in (root, *root["children"]))
        assert [owner.state for owner in (group, pool, runtime)] == ["closed"] * 3
        with pytest.raises(ClosedError, match=r"leaving its with block at .*startup\.py:\d+"):
            runtime.reserve()
        again = self.spawn_alone({"echo": colocate.role(Echo)}, slots=1)
        again.close()
        again.close()
        assert not again.owner.owner.alive
        with pytest.raises(ClosedError, match=r"group\.close\(\) at .*startup\.py:\d+"):
            again.role("echo", Echo).noop()

    @smoke
    def test_by_name(self, spawn: Spawn) -> None:
        """A role can be given as text of the form "module:Class"."""
        group = spawn({"echo": colocate.role("colocate.testing.probes.plain:Echo", tag="by name")}, slots=1)
        assert group.role("echo", Echo).tag_and_rank() == [("by name", 0)]

    def test_hanging_constructor(self, spawn: Spawn) -> None:
        """With `timeout=`, a spawn whose constructor hangs raises an error that names the late ranks."""
        with Gate() as gate:
            with pytest.raises(RoleStartError, match="did not construct its roles in time") as caught:
                spawn({"slow": colocate.role(HangsAtStart, gate.address, (1,))}, timeout=0.2 + 4 * self.start_s)
            assert set(caught.value.errors) == {1}
            (note,) = caught.value.__notes__  # The note has the stack of the late rank.
            assert "did not end within 0 s" not in note
            assert "running slow.__init__" in note

    @needs(OwnProcess)
    def test_dying_constructor(self, spawn: Spawn) -> None:
        """A worker that dies while it constructs its roles is reported as `WorkerDied`."""
        with pytest.raises(RoleStartError) as caught:
            spawn({"bad": colocate.role(DiesAtStart, 5, (1,))})
        (error,) = caught.value.errors.values()
        assert isinstance(error, WorkerDied)
        assert (error.rank, error.exitcode) == (1, 5)

    @smoke
    def test_environment(self, runtime: Runtime) -> None:
        """`env=` is set in workers before any role is imported, and is refused if workers are threads of the driver.

        A library that asks for Ray doesn't start Ray in a worker, unless the environment names a Ray cluster.
        """
        env = {"COLOCATE_PROBE": "set"}
        if not isinstance(runtime._node.services.executor, OwnProcess):
            with pytest.raises(CapabilityError, match="lacks OwnProcess") as caught:
                runtime.reserve(1, env=env)
            assert caught.value.capability == "OwnProcess"
            assert "local with processes=True" in caught.value.executors
            assert isinstance(caught.value, NotImplementedError)
            return
        with runtime.reserve(1, cpus=0, env=env) as pool, runtime.reserve(1, cpus=0) as other:
            roles = {"early": colocate.role(Early)}
            assert pool.spawn(roles).role("early", Early).at_import() == ["set"]
            echo = other.spawn({**roles, "echo": colocate.role(Echo)})
            assert echo.role("early", Early).at_import() == [None]
            assert echo.role("echo", Echo).env("RAY_ENABLE_AUTO_CONNECT") == ["0"]


BORN = {"born": colocate.role(Born)}


def _find_templates(group: ColocatedGroup) -> set[psutil.Process]:
    starters = {find_starter(facts["pid"]) for facts in group.role("born").process()}
    children = [child for starter in starters for child in psutil.Process(starter).children()]
    return {child for child in children if child.cmdline()[2:5] == ["-m", "colocate.worker", MODE]}


class Templates(ExecutorCase):
    """A worker that was forked from a template behaves like a worker that was started directly."""

    @needs(OwnProcess)
    def test_environment_of_a_fork(self, runtime: Runtime) -> None:
        """A forked worker has the pool's environment variables, also those that Python reads at its start."""
        for env, hashes in (({"COLOCATE_PROBE": "set"}, None), ({"PYTHONHASHSEED": "7"}, {"PYTHONHASHSEED": "7"})):
            with runtime.reserve(1, cpus=0, env=env) as pool, pool.spawn(BORN) as group:
                ((name, value),) = env.items()
                ((shown_by_kernel, shown, digest),) = group.role("born", Born).shown(name)
                assert (shown_by_kernel, shown) == (value, True)
                if hashes is not None:
                    command = [sys.executable, "-c", "print(hash('colocate'))"]
                    same = subprocess.run(command, env={**os.environ, **hashes}, stdout=subprocess.PIPE, check=True)
                    assert same.stdout.decode().strip() == digest

    @needs(OwnProcess)
    def test_the_template_is_killed(self, spawn: Spawn) -> None:
        """Killing a template ends no worker, and the next group's workers get a new template."""
        group = spawn(BORN)
        templates = _find_templates(group)
        ended = Processes(template.pid for template in templates)
        for template in templates:
            template.kill()
        ended.wait_all()
        ended.release_all()
        assert len(group.role("born", Born).made_up()) == 2
        other = spawn({**BORN, "faulty": colocate.role(Faulty)})
        assert templates
        assert _find_templates(other)
        assert not _find_templates(other) & templates
        error = other.role("faulty", Faulty).exit.submit(3, "by os._exit").exception(PATIENCE_S)
        assert isinstance(error, WorkerDied)
        assert error.exitcode == 3
        assert group.alive

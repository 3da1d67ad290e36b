"""How the processes of workers begin: as forks of a template, which may be killed, or by themselves."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

import colocate
from colocate import ColocatedGroup, Runtime
from colocate.errors import WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, of_executor
from colocate.testing.probes.born import Born
from colocate.testing.probes.faulty import Faulty
from colocate.testing.waiting import PATIENCE_S, Processes, starter_of
from colocate.worker.birth.template import MODE

ROLES = {"born": colocate.role(Born)}


def _templates(group: ColocatedGroup) -> set[psutil.Process]:
    """The templates of those who have started a group's workers."""
    starters = {starter_of(facts["pid"]) for facts in group.role("born").process()}
    children = [child for starter in starters for child in psutil.Process(starter).children()]
    return {child for child in children if child.cmdline()[2:5] == ["-m", "colocate.worker", MODE]}


class Templates(ExecutorCase):
    """A worker that was forked is as one that was started by itself."""

    @needs(OwnProcess)
    def test_what_it_draws(self, spawn: Spawn) -> None:
        """No two workers draw the same from generators that nobody has seeded, nor does a later group."""
        drawn = [draws for _ in range(2) for draws in spawn(ROLES).role("born", Born).drawn()]
        assert len({each[0] for each in drawn}) == len({each[1] for each in drawn}) == 4

    @needs(OwnProcess)
    def test_threads_of_a_fork(self, runtime: Runtime) -> None:
        """Torch has as many threads as the slot has CPUs, where it was found imported too, and they work."""
        with runtime.reserve(1, cpus=1) as pool:
            for _ in range(2):
                with pool.spawn(ROLES) as group:
                    assert group.role("born", Born).threads() == [(1, float(1 << 22))]

    @needs(OwnProcess)
    @of_executor
    def test_environment_of_a_fork(self, runtime: Runtime) -> None:
        """It has the pool's, and the kernel shows it; what is read before any import starts another interpreter."""
        for env, hashes in (({"COLOCATE_PROBE": "set"}, None), ({"PYTHONHASHSEED": "7"}, {"PYTHONHASHSEED": "7"})):
            with runtime.reserve(1, cpus=0, env=env) as pool, pool.spawn(ROLES) as group:
                ((name, value),) = env.items()
                ((found, shown, digest),) = group.role("born", Born).shown(name)
                assert (found, shown) == (value, True)
                if hashes is not None:
                    command = [sys.executable, "-c", "print(hash('colocate'))"]
                    same = subprocess.run(command, env={**os.environ, **hashes}, stdout=subprocess.PIPE, check=True)
                    assert same.stdout.decode().strip() == digest

    @needs(OwnProcess)
    @of_executor
    def test_the_template_is_killed(self, spawn: Spawn) -> None:
        """That ends no worker; the next group has another template, and its workers end as ever."""
        group = spawn(ROLES)
        found = _templates(group)
        ended = Processes(template.pid for template in found)
        for template in found:
            template.kill()
        ended.wait()
        ended.close()
        assert len(group.role("born", Born).drawn()) == 2
        other = spawn({**ROLES, "faulty": colocate.role(Faulty)})
        assert found
        assert _templates(other)
        assert not _templates(other) & found
        error = other.role("faulty", Faulty).exit.submit(3, "by os._exit").exception(PATIENCE_S)
        assert isinstance(error, WorkerDied)
        assert error.exitcode == 3
        assert group.alive

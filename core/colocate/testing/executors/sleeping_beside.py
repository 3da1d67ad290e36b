"""Sleep and wake beside all else: calls, residents, checkpoints, failures, restarts, drivers that come and go."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Runtime
from colocate.errors import (
    PipelineError,
    RoleError,
    SleepingError,
)
from colocate.executor import OwnProcess
from colocate.testing.executors._base import Spawn, needs
from colocate.testing.executors.renewals import alone
from colocate.testing.executors.sleeping import Dozers
from colocate.testing.gate import Gate
from colocate.testing.probes.sleepers import Dozing, Sharing
from colocate.testing.probes.trainers import Renewing
from colocate.testing.waiting import PATIENCE_S, wait_until

_MIB = 2**20
_MIBS = 8


def _reach(ctx: colocate.Context) -> int:
    nbytes: int = ctx.sibling("actor", Dozing).net.weight.nbytes
    return nbytes


class SleepingBeside(Dozers):
    """A role that sleeps, or wakes, while other things go on."""

    def test_sleep_in_a_pipeline(self, dozing: ColocatedGroup) -> None:
        """Its calls wake, too; sleep and wake themselves wait for what they do."""
        actor = dozing.role("actor", Dozing)
        before = actor.digest()
        dozing.sleep("actor")
        with dozing.pipeline():
            first, second = actor.look.submit(), actor.digest.submit()
            with pytest.raises(PipelineError, match=r"the sleep of actor would wait .*: call it before or after the"):
                dozing.sleep("actor")
            with pytest.raises(PipelineError, match=r"the wake of actor would wait .*: call it before or after the"):
                dozing.wake("actor")
        assert second.result(PATIENCE_S) == before
        assert first.result(PATIENCE_S)

    def test_residents_of_a_sleeping_role(self, dozing: ColocatedGroup) -> None:
        """They can be used, by value and by reference."""
        actor, other = dozing.role("actor", Dozing), dozing.role("other", Sharing)
        kept = actor.make.keep(_MIB)
        kept.wait()
        dozing.sleep("actor")
        assert other.total(kept.ref) == [2.0 * _MIB] * 2
        assert len(kept.fetch()) == 2
        assert actor.asleep.options(ranks=[0])()  # its method needs nothing awake

    def test_sibling_of_a_sleeping_role(self, dozing: ColocatedGroup) -> None:
        """It isn't reached by accident: who wants it, a role or a function, is told what to do."""
        other = dozing.role("other", Sharing)
        dozing.sleep("actor")
        for reach in (lambda: other.share("actor"), lambda: dozing.run(_reach)):
            with pytest.raises(RoleError, match=r"memory of role 'actor' sleeps.*group\.wake\('actor'\)") as caught:
                reach()
            assert isinstance(caught.value.__cause__, SleepingError)
        dozing.wake("actor")
        other.share("actor")
        assert dozing.run(_reach) == [_MIBS * _MIB] * 2

    def test_checkpoint_of_a_sleeping_role(self, dozing: ColocatedGroup, tmp_path: Path) -> None:
        """It is awake as it is saved; then as much of it sleeps as before, and what has come since stays awake."""
        actor = dozing.role("actor", Dozing)
        dozing.sleep("actor", ["optimizer", "cache"])
        actor.refill(_MIBS)

        def look() -> tuple[list[list[str]], list[list[int]]]:
            roles = [slot.roles for slot in dozing.memory().slots]
            return actor.asleep(), [[role.asleep, role.total] for each in roles for role in each]

        before = look()
        dozing.checkpoint(tmp_path / "c")  # `Dozing.save` asserts that it is awake
        assert look() == before
        digest = actor.digest()
        dozing.sleep("actor")
        dozing.checkpoint(tmp_path / "c")
        assert actor.asleep() == [["weights", "grads", "optimizer", "cache"]] * 2
        assert actor.digest() == digest

    @needs(OwnProcess)
    def test_sleep_of_a_model_in_shards(self, spawn: Spawn) -> None:
        """By FSDP2: each rank's shards are its own, and count so; training goes on."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Renewing, "fsdp2")})
        trainer = group.role("trainer", Renewing)
        expected, weights = alone()
        size = sum(value.nbytes for value in weights.values())
        parts = [slot.roles[0].device["parameters"] for slot in group.memory().slots]
        assert size <= sum(parts) <= 1.25 * size  # torch pads what can't be cut evenly
        losses = []
        for number, _ in enumerate(expected):
            group.sleep("trainer", discard=("grads", "cache") if number % 2 else ())
            losses.append(sum(trainer.step(number)) / 2)
        assert losses == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("what", ["sleep", "wake", "call"])
    def test_while_an_earlier_call_fails(self, dozing: ColocatedGroup, what: str) -> None:
        """A rank waits for the others to sleep or wake, of which one has failed: all do it after that."""
        actor, other = dozing.role("actor", Dozing), dozing.role("other", Sharing)
        before = actor.digest()
        if what != "sleep":
            dozing.sleep("actor")
        with Gate() as gate, ThreadPoolExecutor(1) as pool:
            failed = other.fail_at.options(ranks=[1]).submit(gate.address)
            gate.wait_for(1)
            doing: dict[str, Callable[[], Any]] = {
                "sleep": partial(dozing.sleep, "actor"),
                "wake": partial(dozing.wake, "actor"),
                "call": actor.digest,
            }
            done = pool.submit(doing[what])
            wait_until(lambda: dozing._node.questions._meetings, "rank 0 waits for rank 1")
            gate.open()
            with pytest.raises(RoleError, match="a bad batch"):
                failed.result(PATIENCE_S)
            assert done.result(PATIENCE_S)
        assert actor.asleep() == [["weights", "grads", "optimizer", "cache"] if what == "sleep" else []] * 2
        assert actor.digest() == before

    @needs(OwnProcess)
    def test_restart_of_a_sleeping_role(self, runtime: Runtime) -> None:
        """The roles of the next generation are awake."""
        pytest.importorskip("torch")
        with runtime.reserve(2, cpus=0) as pool:
            group = pool.spawn({"actor": colocate.role(Dozing, 1)}, on_failure="restart")
            actor = group.role("actor", Dozing)
            group.sleep("actor")
            pid = group.run(_pid)[1]
            os.kill(pid, 9)
            wait_until(lambda: group.generation == 1, "it is made anew")
            group.wait_ready(PATIENCE_S)
            assert actor.asleep() == [[]] * 2
            assert group.sleep("actor")
            assert actor.look()


def _pid(ctx: colocate.Context) -> int:
    return os.getpid()

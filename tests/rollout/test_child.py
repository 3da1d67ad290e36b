"""An engine in a child process: its failures leave the trainer alone, and its environment is its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.rollout.odd import EXITS, FINE, HANGS, RAISES, Odd

import colocate
from colocate import CallTimeout, ChildDied, GroupRestarted, RoleError, RoleStartError
from colocate.testing.waiting import PATIENCE_S, Processes
from colocate_rollout import Sampling
from colocate_rollout.role import EngineRole
from colocate_rollout.testing import LLAMA, PROMPTS, Trainer

OPTIONS: dict[str, Any] = {"engine": "transformers", "max_rows": 4, "max_batch_tokens": 16}
CHILD = {"env": {"OMP_NUM_THREADS": "1", "OF_THE_ENGINE": "yes"}}
SEEDED = Sampling(max_tokens=12, seed=7)
ENDLESS = Sampling(max_tokens=60, stop_token_ids=())


def odd(**child: Any) -> Any:
    return colocate.role(EngineRole, Odd, child={**CHILD, **child})


@pytest.fixture(scope="module")
def runtime() -> Iterator[colocate.Runtime]:
    with colocate.connect("local", processes=True, seed=3) as runtime:
        yield runtime


def _pid(_: colocate.Context) -> int:
    return os.getpid()


def pid_of(view: Any) -> int:
    """Return the pid of the child, which the engine gives as a token."""
    ((row,),) = view.generate([[FINE]])
    return int(row.token_ids[0])


@pytest.mark.long
def test_the_trainer_goes_on(runtime: colocate.Runtime) -> None:
    """A child's engine draws the rows of one in the worker; a killed child fails calls until the next sync."""
    roles = {
        "trainer": colocate.role(Trainer, LLAMA),
        "here": colocate.role("rollout.engine", role="trainer", **OPTIONS),
        "child": colocate.role("rollout.engine", role="trainer", child=CHILD, **OPTIONS),
    }
    with runtime.reserve(slots=1) as pool:
        group = pool.spawn(roles)
        trainer, here, child = (group.role(name) for name in roles)
        with pytest.raises(RoleError, match=r"no whole weights: no sync was made yet; call colocate\.sync_weights"):
            child.generate(PROMPTS)
        for version in (1, 2):
            trainer.step()
            colocate.sync_weights(trainer, child)
            found = child.generate(PROMPTS, 2, sampling=SEEDED)
            wanted = here.generate(PROMPTS, 2, sampling=SEEDED)
            assert [[row.token_ids for row in rows] for rows in found] == [
                [row.token_ids for row in rows] for rows in wanted
            ]
            assert dict(child.generate.stream(PROMPTS, 2, sampling=SEEDED)) == dict(enumerate(found))
            if version == 1:
                assert [row for row in group.memory().rows() if row["role"] == "child/engine"]
                assert group.sleep("child") == group.sleep("here") > 0
                with child.generate.stream(PROMPTS * 100, sampling=ENDLESS) as rows:
                    next(rows)
                    os.kill(_child(runtime), signal.SIGKILL)
                    with pytest.raises(ChildDied):
                        list(rows)
                with pytest.raises(ChildDied, match=r"child 'engine' of role 'child' .* was killed by SIGKILL"):
                    child.generate(PROMPTS)
                assert here.generate(PROMPTS, 2, sampling=SEEDED) == wanted
        with pytest.raises(CallTimeout):
            child.generate.options(timeout=0.2)(PROMPTS * 400, 4, sampling=ENDLESS)
        assert child.generate(PROMPTS, 2, sampling=SEEDED) == found


def _running(runtime: colocate.Runtime) -> list[int]:
    nodes = [runtime.graph.data()]
    for node in nodes:
        nodes += node["children"]
    return [int(node["pid"]) for node in nodes if node["kind"] == "child" and node["state"] == "running"]


def _child(runtime: colocate.Runtime) -> int:
    (found,) = _running(runtime)
    return found


def test_child_failure_is_error_with_reason(runtime: colocate.Runtime) -> None:
    """The exit, hang or exception of a child is an error with the reason, and a dead child is replaced."""
    with runtime.reserve(slots=1) as pool:
        group = pool.spawn({"odd": odd(hung_after=1.0)})
        view, worker = group.role("odd"), group.run(_pid)[0]
        first = pid_of(view)
        assert first != worker
        with pytest.raises(ChildDied, match="exited with code 3") as caught:
            view.generate([[FINE], [EXITS]])
        assert "it has had enough" in str(caught.value)
        second = pid_of(view)
        with pytest.raises(ChildDied, match="hung: it gave no sign for") as caught:
            view.generate([[HANGS]])
        assert "in rows" in str(caught.value.log_tail)
        assert group.run(_pid)[0] == worker
        with pytest.raises(RoleError, match="asked for it by Context") as raised:
            view.generate([[RAISES]])
        assert "In the engine's own process" in str(raised.value)
        assert 'raise OddError(self.ctx, "asked for it")' in str(raised.value)
        assert pid_of(view) not in (first, second)


@pytest.mark.long
def test_timed_out_call_ends_hanging_child(runtime: colocate.Runtime) -> None:
    """A timed-out call in a hanging child ends the child, and the group isn't restarted."""
    with runtime.reserve(slots=1) as pool:
        group = pool.spawn({"odd": odd()})
        with pytest.raises(CallTimeout):
            group.role("odd").generate.options(timeout=0.5)([[HANGS]])
        assert pid_of(group.role("odd"))
        assert group.generation == 0


def test_child_exit_restarts_group(runtime: colocate.Runtime) -> None:
    """With `fails="group"` the exit of a child restarts the group."""
    with runtime.reserve(slots=1) as pool:
        group = pool.spawn({"odd": odd(fails="group")}, on_failure="restart")
        error = group.role("odd").generate.submit([[EXITS]]).exception(PATIENCE_S)
        assert isinstance(error, GroupRestarted | ChildDied)
        group.wait_ready(PATIENCE_S)
        assert pid_of(group.role("odd"))
        assert group.generation == 1


@pytest.mark.parametrize("how", ["close", "kill"])
def test_nothing_is_left(runtime: colocate.Runtime, how: str) -> None:
    """A child ends with its group, and with its killed worker."""
    with runtime.reserve(slots=1) as pool:
        group = pool.spawn({"odd": odd(python=sys.executable)})
        with Processes([pid_of(group.role("odd"))]) as child:
            if how == "close":
                group.close()
            else:
                os.kill(group.run(_pid)[0], signal.SIGKILL)
            child.wait_all()


@pytest.mark.parametrize(
    ("child", "options", "said"),
    [
        ({"pyton": "3"}, {}, "child has no parameter 'pyton'; did you mean 'python'?"),
        ({"fails": "all"}, {}, "fails: must be 'call' or 'group'"),
        ({"bucket": "25 loaves"}, {}, "bucket='25 loaves' is no size"),
        ({"hung_after": 0}, {}, "'hung_after' must be > 0"),
        (3, {}, "child=3: true or false, or a mapping with what ChildOptions has"),
        ({"python": "/nowhere/python"}, {}, "the program '/nowhere/python' isn't found"),
        ({"within": 0.01}, {}, r"wasn't ready within 0.01 s (ready=ChildEngine._is_ready hasn't returned)"),
        (True, {"refuses": True}, "made by Context"),
        (True, {"refuse": True}, "engine 'Odd' has no parameter 'refuse'; did you mean 'refuses'?"),
    ],
)
def test_wrong_ones(child: Any, options: dict[str, Any], said: str) -> None:
    """A wrong option of a child or its engine fails the role's start, with the reason."""
    with pytest.raises(RoleStartError) as caught:
        colocate.spawn({"odd": colocate.role(EngineRole, Odd, child=child, **options)})
    assert said in str(caught.value)


def test_ranks_that_would_be_one_engine() -> None:
    """An engine in a child is refused if the role's mesh has a `tp` axis."""
    role = colocate.role(EngineRole, Odd, child=True).on(mesh={"dp": 1, "tp": 2})
    with pytest.raises(RoleStartError, match="ranks along the axis 'tp' would be one engine"):
        colocate.spawn({"odd": role}, slots=2)

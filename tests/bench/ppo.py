"""The framework's time in a step of PPO and of GRPO: the demos' own jobs and groups, whose roles do nothing.

A first run of a few steps is recorded, role by role and method by method. Then the same job runs on roles of the same
methods, which only return the recorded values: same calls, same residents, no work.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
from tests.bench.measure import Rounds
from tests.bench.rows import Row

import colocate
from colocate._role.method_spec import MethodSpec
from colocate._role.role import methods_of
from colocate_ppo.actor import Actor
from colocate_ppo.critic import Critic
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.reference import Reference
from colocate_ppo.reward import Reward
from colocate_ppo.task import Problems, Task
from colocate_rollout.role import EngineRole

_EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
_STEPS = 1200
_ROUND = 20
_BARS_MS = {"local": 1.5, "ray": 3.0, "dask": 3.0}
_SMALL = [f"+groups.policy.roles.actor.with.{size}" for size in ("hidden=32", "feed_forward=32", "layers=1")]
# One evaluation at the beginning, of as many answers as a step has: a recorded score fits both.
_JOB = {"warm_up_steps": 0, "eval_problems": 256, "eval_every": 10**6, "checkpoint_every": 10**6}


@attrs.frozen
class _Demo:
    """An example, the names of its roles' classes, and options of its job."""

    example: str
    roles: dict[str, str]
    job: dict[str, int | str]


_DEMOS = {
    "PPO": _Demo(
        "ppo.yaml",
        {"actor": "Actor", "critic": "Critic", "reference": "Reference", "reward": "Reward"},
        {"batch": 256},
    ),
    "GRPO": _Demo(
        "grpo.yaml",
        {"actor": "GroupActor", "rollout": "EngineRole", "reward": "Reward"},
        {"batch": 32, "samples": 8},
    ),
}

_recorded: dict[tuple[str, str, int], Any] = {}


def _rows_asked(arguments: dict[str, Any]) -> int:
    return len(arguments.get("problems", ()))


def _record(cls: type, spec: MethodSpec) -> Callable[..., Any]:
    if spec.yields:
        return _record_yielded(cls, spec)

    @functools.wraps(spec.function)
    def body(self: Any, *given: Any, **named: Any) -> Any:
        arguments = spec.bind(given, named)
        result = spec.function(self, **arguments)
        _recorded[cls.__name__, spec.name, _rows_asked(arguments)] = result
        return result

    return body


def _record_yielded(cls: type, spec: MethodSpec) -> Callable[..., Any]:
    @functools.wraps(spec.function)
    def body(self: Any, *given: Any, **named: Any) -> Any:
        arguments = spec.bind(given, named)
        _recorded[cls.__name__, spec.name, _rows_asked(arguments)] = found = [*spec.function(self, **arguments)]
        yield from found

    return body


def _replay(cls: type, spec: MethodSpec) -> Callable[..., Any]:
    if spec.yields:
        return _replay_yielded(cls, spec)

    @functools.wraps(spec.function)
    def body(self: Any, **arguments: Any) -> Any:
        return self.recorded[cls.__name__, spec.name, _rows_asked(arguments)]

    return body


def _replay_yielded(cls: type, spec: MethodSpec) -> Callable[..., Any]:
    @functools.wraps(spec.function)
    def body(self: Any, **arguments: Any) -> Any:
        yield from self.recorded[cls.__name__, spec.name, _rows_asked(arguments)]

    return body


def _with_bodies(cls: type, make: Callable[[type, MethodSpec], Callable[..., Any]], **more: Any) -> type:
    """Return the same role class with other method bodies."""
    methods = {
        name: colocate.method(dispatch=spec.dispatch, collect=None if spec.yields else spec.collect)(make(cls, spec))
        for name, spec in methods_of(cls).items()
    }
    return type(cls.__name__, (cls,), {**methods, **more, "__module__": __name__})


def _replaying(cls: type) -> type:
    def __init__(self: Any, recorded: str, **options: Any) -> None:
        cls.__init__(self, **options)  # type: ignore[misc]
        self.recorded = pickle.loads(Path(recorded).read_bytes())

    # These roles have no models: their checkpoints are empty, and synced weights are dropped.
    hooks = {"save": _nothing, "restore": _nothing, "load_weights": _no_weights}
    return _with_bodies(cls, _replay, __init__=__init__, **{name: hooks[name] for name in hooks if hasattr(cls, name)})


def _nothing(self: Any, directory: str) -> None:
    pass


def _no_weights(self: Any, weights: Any, version: int) -> None:
    for _ in weights:  # a sync must be read to its end
        pass


class Recording:
    EngineRole = _with_bodies(EngineRole, _record)
    Actor = _with_bodies(Actor, _record)
    Critic = _with_bodies(Critic, _record)
    GroupActor = _with_bodies(GroupActor, _record)
    Reference = _with_bodies(Reference, _record)
    Reward = _with_bodies(Reward, _record)


class RecordedRollouts:
    EngineRole = _replaying(EngineRole)
    Actor = _replaying(Actor)
    Critic = _replaying(Critic)
    GroupActor = _replaying(GroupActor)
    Reference = _replaying(Reference)
    Reward = _replaying(Reward)


def rows() -> Iterator[Row]:
    """Yield the time from step to step, taken where a step draws its problems on the driver."""
    for name, demo in _DEMOS.items():
        yield from _rows(f"framework time per {name} step", demo)


def _rows(part: str, demo: _Demo) -> Iterator[Row]:
    problems: list[Problems] = []
    begun: list[float] = []
    draw = Task.draw

    def drawn(task: Task, count: int) -> Problems:
        if not problems:
            problems.append(draw(task, count))
        begun.append(time.perf_counter())
        return problems[0]

    _recorded.clear()
    with mock.patch.object(Task, "draw", drawn), tempfile.NamedTemporaryFile() as recorded:
        _train(demo, "local", "Recording", 1)
        recorded.write(pickle.dumps(_recorded))
        recorded.flush()
        for executor, bar_ms in _BARS_MS.items():
            begun.clear()
            _train(demo, executor, "RecordedRollouts", _STEPS, recorded=recorded.name)
            name = "threads" if executor == "local" else executor
            yield Row(part, f"{name}, 1 slot", _least_median_s(begun) * 1e3, "ms", bar_ms)


def _least_median_s(begun: list[float]) -> float:
    seconds = [end - start for start, end in pairwise(begun)]
    rounds = [statistics.median(seconds[at : at + _ROUND]) for at in range(0, len(seconds) - _ROUND + 1, _ROUND)]
    return Rounds(rounds).least


def _train(demo: _Demo, executor: str, kind: str, steps: int, **options: str) -> None:
    """Run the demo's job with other roles, in a temporary folder, without a screen."""
    roles = [(f"groups.policy.roles.{role}", cls) for role, cls in demo.roles.items()]
    changes = [f"{path}.use={__name__}:{kind}.{cls}" for path, cls in roles]
    changes += [f"+{path}.with.{key}={value}" for path, _ in roles for key, value in options.items()]
    job = {**_JOB, **demo.job, "steps": steps}
    changes += [*_SMALL, *(f"+job.with.{name}={value}" for name, value in job.items())]
    config = colocate.load_config(_EXAMPLES / demo.example, executor=executor, set=changes)
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory), colocate.launch(config) as launched:
        launched.run(quiet=True)

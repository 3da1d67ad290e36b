"""The common part of this plugin's jobs: warm-up, evaluation, checkpoints, recovery from failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from colocate import ColocatedGroup, ConfigError, RoleError, RoleSpec, Run
from colocate_ppo.options import AMOUNT, BOUND, COUNT, POSITIVE, SHARE, Limit, limit_problems
from colocate_ppo.recovery import OnStepFailure, Recovery
from colocate_ppo.task import Problems, Task, compare_rows, question_text
from colocate_ppo.team import Players

T = TypeVar("T")

_SHOWN = 8
_PROGRESS = "progress.json"
_ANSWERS = "answers to held-out problems"
_WARM_UP_STEPS = 500
_LIMITS: Mapping[str, Limit] = {
    "max_new_tokens": COUNT,
    "warm_up_steps": AMOUNT,
    "warm_up_batch": COUNT,
    "warm_up_ramp": AMOUNT,
    "flawed": SHARE,
    "steps": AMOUNT,
    "batch": COUNT,
    "minibatch": COUNT,
    "epochs": COUNT,
    "temperature": POSITIVE,
    "clip": BOUND,
    "kl_coefficient": AMOUNT,
    "actor_ramp": AMOUNT,
    "actor_decay": SHARE,
    "eval_every": AMOUNT,
    "eval_problems": COUNT,
    "checkpoint_every": AMOUNT,
    "step_retries": AMOUNT,
}


@attrs.define
class Progress:
    """The job's progress, which each checkpoint stores in a JSON file.

    Attributes:
        warmed: Warm-up steps done.
        step: Steps done after the warm-up.
        position: The next position of the task's training stream.
        before: Answers after the warm-up to the held-out problems that the report shows.
        rows: The description of the task's rows (`Task.describe_rows`).
    """

    warmed: int = 0
    step: int = 0
    position: int = 0
    before: list[str] = attrs.field(factory=list)
    rows: dict[str, Any] = attrs.field(factory=dict)

    def write_file(self, path: Path) -> None:
        """Write the progress to a file."""
        path.write_text(json.dumps(attrs.asdict(self)), encoding="utf-8")

    def read_file(self, path: Path) -> None:
        """Read the progress from a file."""
        for name, value in json.loads(path.read_text(encoding="utf-8")).items():
            setattr(self, name, value)


class Training:
    """A job's training loop: a supervised warm-up, then steps that the job defines.

    Args:
        run: The job's run.
        workers: The group.
        team: The group's roles.
        task: The name of a reasoning-gym dataset.
        task_options: Options of the dataset.
        max_new_tokens: The longest answer; None for two more than the characters of the longest right answer.
        warm_up_steps: Steps of supervised learning; None for 500, or for 0 if the actor's model is pretrained.
        warm_up_batch: Demonstrations in each warm-up step.
        warm_up_ramp: Steps until the warm-up's learning rate is reached.
        flawed: The fraction of demonstrations that are wrong on purpose.
        steps: Steps after the warm-up.
        eval_every: Steps between evaluations.
        eval_problems: Problems in an evaluation.
        checkpoint_every: Steps between checkpoints.
        checkpoint_waits: Whether the next step waits until a checkpoint is written.
        on_step_failure: The reaction when a role raises in a step.
        step_retries: How often the same part is repeated.
        same_rows: Whether a resumed run must have the same rows.
        job: The job's name, for errors.

    Attributes:
        team: The group's roles.
        problems: The task that provides the problems.
        longest: The longest answer in tokens.
        progress: The job's progress.
        begins_at: The position of the training stream for the next checkpoint, if the job has drawn ahead.
    """

    def __init__(
        self,
        run: Run,
        workers: ColocatedGroup,
        team: Players[Any],
        *,
        task: str,
        task_options: Mapping[str, Any] | None,
        max_new_tokens: int | None,
        warm_up_steps: int | None,
        warm_up_batch: int,
        warm_up_ramp: int,
        flawed: float,
        steps: int,
        eval_every: int,
        eval_problems: int,
        checkpoint_every: int,
        checkpoint_waits: bool,
        on_step_failure: OnStepFailure,
        step_retries: int,
        same_rows: bool,
        job: str,
    ) -> None:
        self._run, self._workers, self.team = run, workers, team
        self.problems = Task(task, task_options or {}, seed=run.runtime.seed)
        self._held_out = self.problems.held_out(eval_problems)
        self._sample_problems = self._held_out[:_SHOWN]
        self.longest = max_new_tokens or max(map(len, self._held_out.answers)) + 2
        if warm_up_steps is None:
            warm_up_steps = 0 if team.actor.is_pretrained() else _WARM_UP_STEPS
        self._warm_up = warm_up_steps, warm_up_batch, warm_up_ramp, flawed
        self._steps, self._eval_every, self._checkpoint_every = steps, eval_every, checkpoint_every
        self._checkpoint_waits = checkpoint_waits
        self.begins_at: int | None = None
        self._rows, self._same_rows, self._job = self.problems.describe_rows(), same_rows, job
        self.progress, self._recovery = Progress(), Recovery(on_step_failure, step_retries, job)

    def run_part(self, name: str, do: Callable[[], T]) -> T:
        """Run a part of a step; `Recovery.run_part` repeats a failed part."""
        return self._recovery.run_part(self._run, name, do)

    def run_training(self, step: Callable[[], dict[str, float]]) -> None:
        """Run the training loop from the start or from a checkpoint.

        Args:
            step: Makes step number `progress.step`, and returns its metrics.
        """
        run, progress = self._run, self.progress
        run.total(self._steps)
        self._show_progress()
        if run.resumed is None:
            self.run_part("align", self.team.align_models)
        # `wait_ready` returns None if the group hasn't been restored from a checkpoint.
        elif self._workers.wait_ready() is None:
            self._restore_checkpoint()
        else:
            self._resume()
        while True:
            try:
                self._steps_to_do(step)
                break
            except RoleError as error:
                self._recovery.restore_checkpoint(run, error, self._restore_checkpoint)
        self._write_checkpoint()
        if progress.before:
            run.show(_ANSWERS, _compare_answers(self._sample_problems, progress.before, self._answers()))

    def _steps_to_do(self, step: Callable[[], dict[str, float]]) -> None:
        run, progress, steps = self._run, self.progress, self._steps
        while progress.warmed < self._warm_up[0] and not run.stopping:
            self._warm_up_step()
        if not progress.before and not run.stopping:
            self.run_part("align", self.team.align_models)
            progress.before = self._answers()
            run.log(0, **self._evaluate())
        while progress.step < steps and not run.stopping:
            progress.step += 1
            metrics = step()
            if progress.step == steps or _is_due(progress.step, self._eval_every):
                metrics |= self._evaluate()
            run.log(progress.step, **metrics, **self._recovery.step_metrics())
            self._show_progress()
            if progress.step < steps and run.is_due(progress.step, self._checkpoint_every) and not run.stopping:
                self._write_checkpoint()

    def _warm_up_step(self) -> None:
        (steps, batch, ramp, flawed), number = self._warm_up, self.progress.warmed
        shown = self.problems.demonstrate(batch, flawed)
        lr_scale = _scale_warm_up_lr(number, ramp, steps)
        self.run_part("warm_up", lambda: self.team.actor.warm_up(shown, lr_scale, number=number))
        self.progress.warmed += 1
        self._show_progress()

    def _show_progress(self) -> None:
        self._run.progress(self.progress.warmed + self.progress.step, self._warm_up[0] + self._steps)

    def _evaluate(self) -> dict[str, float]:
        return self.run_part("evaluate", lambda: self.team.evaluate(self._held_out, self.longest))

    def _answers(self) -> list[str]:
        return self.run_part("evaluate", lambda: self.team.answers(self._sample_problems, self.longest))

    def _resume(self) -> None:
        assert self._run.resumed is not None
        self.progress.read_file(self._run.resumed / _PROGRESS)
        before = self.progress.rows  # Empty in checkpoints of older colocate versions.
        if self._same_rows and before and (difference := compare_rows(before, self._rows)) is not None:
            raise ConfigError(
                f"{self._job}: the run can't go on after step {self.progress.step}, as task {self.problems.name!r} "
                f"gives other rows than before: {difference}. Give the same rows, begin a new run (without --resume), "
                "or set `same_rows: false` to go on with these at the same position"
            )
        self.problems.position = self.progress.position
        self._show_progress()

    def _restore_checkpoint(self) -> None:
        assert self._run.resumed is not None
        folder = self._run.resumed / self._workers.name
        self.run_part("restore", lambda: self._workers.restore(folder))
        self._resume()

    def _write_checkpoint(self) -> None:
        progress = self.progress
        progress.rows = self._rows
        progress.position = self.problems.position if self.begins_at is None else self.begins_at

        def write() -> None:
            with self._run.checkpoint(progress.step) as directory:
                folder = directory / self._workers.name
                self._workers.checkpoint(folder, tag=progress.step, wait=self._checkpoint_waits)
                progress.write_file(directory / _PROGRESS)

        self.run_part("checkpoint", write)
        self._recovery.on_checkpoint()


def find_group(run: Run, name: str | None, job: str) -> ColocatedGroup:
    """Return the run's group with a name, or the only group if the name is None.

    Raises:
        ConfigError: No group matches, or several groups match.
    """
    named = [group for key, group in run.groups.items() if name in (None, key)]
    if len(named) != 1:
        there_are = ", ".join(run.groups) or "none"
        raise ConfigError(f"{job}: option `group` must name the group to train in; the config has {there_are}")
    return named[0]


def option_problems(
    options: Mapping[str, Any],
    limits: Mapping[str, Limit],
    place: str,
    classes: Mapping[str, type | None],
    wanted: Mapping[str, type],
) -> Iterator[tuple[str, str]]:
    """Yield each wrong option of a job, and each missing role of the job's group, with an error text.

    Args:
        options: The job's options.
        limits: Limits of the options that only this job has.
        place: The group's name.
        classes: The classes of the group's roles; None for an unknown class.
        wanted: The roles that the job needs, with the class of each.
    """
    yield from limit_problems(options, {**_LIMITS, **limits})
    for role, cls in wanted.items():
        if role not in classes:
            yield "group", f"needs a role {role!r}; {place!r} has {', '.join(classes)}"
        elif (role_class := classes[role]) is not None and not issubclass(role_class, cls):
            names = [f"{role_type.__module__}:{role_type.__qualname__}" for role_type in (role_class, cls)]
            yield "group", f"has {role!r} of {names[0]} in {place!r}, where a subclass of {names[1]} is needed"


def find_classes(roles: Mapping[str, RoleSpec[Any]]) -> dict[str, type | None]:
    """Return the class of each role in a config, by name; None for a class that isn't imported."""
    return {name: spec.target if isinstance(spec.target, type) else None for name, spec in roles.items()}


def scale_actor_lr(step: int, steps: int, still: int, ramp: int, decay: float) -> float:
    """Return the factor of the actor's learning rate: 0, then a ramp to 1, then a linear decay to 0.

    The factor is 0 in the first `still` steps, reaches 1 at step `ramp`, and decays in the last part `decay` of all
    steps.
    """
    if step <= still:
        return 0.0
    return min(1.0, step / max(1, ramp), (steps - step + 1) / max(1.0, decay * steps))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _compare_answers(problems: Problems, before: Sequence[str], after: Sequence[str]) -> list[dict[str, str]]:
    columns = zip(problems, before, after, strict=True)
    return [{"question": question_text(p.question), "right": p.answer, "before": b, "after": a} for p, b, a in columns]


def _scale_warm_up_lr(done: int, ramp: int, steps: int) -> float:
    return min((done + 1) / max(1, ramp), (steps - done) / max(1, steps - ramp))

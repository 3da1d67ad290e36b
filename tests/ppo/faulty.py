"""An actor that raises once, on one rank, at a place that a test chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from colocate import Concat, Reduce, Scatter, method
from colocate_ppo.actor import Actor
from colocate_ppo.rollout import Estimates, Rollout
from colocate_ppo.task import Problems

Where = Literal["rollout", "before", "backward", "last collective", "update"]


class Failure(Exception):
    """The error of a faulty actor."""


class FaultyActor(Actor):
    """An actor that fails once, in one step, on its last rank.

    Args:
        where: In a rollout, after its answers were drawn; or in the update: at the start, in the backward pass,
            after the last collective (but before the optimizer), or after the optimizer.
        step: The step of the failure.
        once: A file that the failure creates: while it exists, nothing fails.
        minibatch: The update's minibatch that fails.
        **options: The options of `Actor`.
    """

    def __init__(self, where: Where, step: int, once: str, minibatch: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.where = where
        self.step = step
        self.once = Path(once)
        self.minibatch = minibatch

    def _fails(self, where: Where) -> bool:
        return where == self.where and self.ctx.rank == self.ctx.world_size - 1 and not self.once.exists()

    def _fail(self) -> None:
        self.once.touch(exist_ok=False)
        raise Failure(f"in step {self.step}: {self.where}")

    @method(dispatch=Scatter("problems"), collect=Concat())
    def generate(self, problems: Problems, *more: Any, **named: Any) -> Rollout:
        answers = super().generate(problems, *more, **named)
        if named.get("number") == self.step and self._fails("rollout"):
            self._fail()
        return answers

    @method(dispatch=Scatter("rollout", "log_probs", "estimates"), collect=Reduce("sum"))
    def update(self, rollout: Rollout, log_probs: Any, estimates: Estimates, *more: Any, **named: Any) -> Any:
        if named["number"] == self.step:
            if self._fails("before"):
                self._fail()
            step, done = self.learner.update_weights, 0

            def failing(*args: Any, **numbers: Any) -> None:
                nonlocal done
                if done == self.minibatch and self._fails("backward"):
                    self._fail_in_backward()
                if done == self.minibatch and self._fails("last collective"):
                    self._fail_in_optimizer()
                step(*args, **numbers)
                if done == self.minibatch and self._fails("update"):
                    self._fail()
                done += 1

            instead: Any = self.learner
            instead.update_weights = failing
            try:
                return super().update(rollout, log_probs, estimates, *more, **named)
            finally:
                del instead.update_weights
        return super().update(rollout, log_probs, estimates, *more, **named)

    def _fail_in_backward(self) -> None:
        def fail(*_: Any) -> None:
            handle.remove()
            self._fail()

        module: Any = self.model.module
        handle = module.model.layers[0].self_attn.register_full_backward_hook(fail)

    def _fail_in_optimizer(self) -> None:
        optimizer: Any = self.learner._optimizer
        optimizer.step = self._fail  # The failure replaces the optimizer's step.

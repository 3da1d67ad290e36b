"""Recover from a failed step: repeat the step, restore the last checkpoint, or end the job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import attrs

from colocate import ConfigError, RenewalError, RoleError, Run

T = TypeVar("T")

OnStepFailure: TypeAlias = Literal["retry", "restore", "fail"]

_log = logging.getLogger("colocate.ppo")


@attrs.define
class Recovery:
    """A job's policy for failed calls of roles.

    The policy doesn't cover a group that can't continue, which is ended, or restarted under `on_failure: restart`.

    Attributes:
        how: The reaction to a failed step.
        limit: How often the same part of a step is repeated, or the same checkpoint is restored.
        job: The job's name, for errors.
        failed: Calls that have failed since the last report.
    """

    how: OnStepFailure
    limit: int
    job: str = "ppo.train"
    failed: int = attrs.field(default=0, init=False)
    _restored: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"{self.job}: option `step_retries` must be 0 or more, not {self.limit}")

    def run_part(self, run: Run, name: str, do: Callable[[], T]) -> T:
        """Run a part of a step in the phase `name`; repeat a failed part if the policy is "retry".

        Raises:
            RoleError: The part has failed for the last time.
        """
        retries = self.limit if self.how == "retry" else 0
        while True:
            try:
                with run.timed(name):
                    return do()
            except RoleError as error:
                self.failed += 1
                if not retries or _is_final(error):
                    raise
                retries -= 1
                _log.warning("%s is done again: %s", name, _describe_error(error))

    def restore_checkpoint(self, run: Run, error: RoleError, restore: Callable[[], None]) -> None:
        """Restore the last checkpoint if the policy is "restore", else raise the error.

        Args:
            run: The run.
            error: The failure.
            restore: Restores the roles and the job from `run.resumed`.

        Raises:
            RoleError: The policy isn't "restore", there is no checkpoint, or the limit is reached.
        """
        if self.how != "restore" or _is_final(error) or self._restored >= self.limit:
            raise error
        step = run.rewind()
        if step is None:
            error.add_note("`on_step_failure: restore` found no checkpoint of the run to go back to")
            raise error
        self._restored += 1
        _log.warning("going back to the checkpoint of step %d: %s", step, _describe_error(error))
        restore()

    def on_checkpoint(self) -> None:
        """Reset the count of restores after a new checkpoint."""
        self._restored = 0

    def step_metrics(self) -> dict[str, float]:
        """Return the metric `failed_calls` if calls have failed since the last report, else an empty dict."""
        failed, self.failed = self.failed, 0
        return {"failed_calls": failed} if failed else {}


def _is_final(error: RoleError) -> bool:
    """Return whether a retry is useless, because the ranks' states differ or the config is wrong."""
    return isinstance(error, RenewalError) or isinstance(error.__cause__, ConfigError)


def _describe_error(error: RoleError) -> str:
    return error.message.partition("\n")[0]

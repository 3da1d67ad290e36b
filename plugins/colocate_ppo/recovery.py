"""What becomes of a step that has failed: it is done again, or the job goes back to its checkpoint, or it ends."""

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
    """What a job does about failed calls of its roles.

    A group that can't go on is another matter: that is ended, or restarted where it has `on_failure: restart`.

    Attributes:
        how: What becomes of a failed step.
        limit: How often the same part of a step is done again, or the same checkpoint is gone back to.
        job: The job's name, for errors.
        failed: How many calls have failed since somebody asked last.
    """

    how: OnStepFailure
    limit: int
    job: str = "ppo.train"
    failed: int = attrs.field(default=0, init=False)
    _restored: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"{self.job}: option `step_retries` must be 0 or more, not {self.limit}")

    def part(self, run: Run, name: str, do: Callable[[], T]) -> T:
        """Do a part of a step, in the phase of this name; once more when it has failed, if that is what is wanted.

        Raises:
            RoleError: It has failed, for the last time.
        """
        left = self.limit if self.how == "retry" else 0
        while True:
            try:
                with run.timed(name):
                    return do()
            except RoleError as error:
                self.failed += 1
                if not left or _is_final(error):
                    raise
                left -= 1
                _log.warning("%s is done again: %s", name, _what(error))

    def restore(self, run: Run, error: RoleError, restore: Callable[[], None]) -> None:
        """Go back to the last checkpoint, if that is what is wanted.

        Args:
            run: The run.
            error: Why.
            restore: Makes the roles and the job be as `run.resumed` has them.

        Raises:
            RoleError: It isn't, there is no checkpoint, or it was gone back to often enough.
        """
        if self.how != "restore" or _is_final(error) or self._restored >= self.limit:
            raise error
        step = run.rewind()
        if step is None:
            error.add_note("`on_step_failure: restore` found no checkpoint of the run to go back to")
            raise error
        self._restored += 1
        _log.warning("going back to the checkpoint of step %d: %s", step, _what(error))
        restore()

    def progressed(self) -> None:
        """There is a new checkpoint."""
        self._restored = 0

    def told(self) -> dict[str, float]:
        """Return what a step has to say about this: `failed_calls`, if any has failed since the last one."""
        failed, self.failed = self.failed, 0
        return {"failed_calls": failed} if failed else {}


def _is_final(error: RoleError) -> bool:
    """Whether another attempt would fail in the same way: ranks that disagree, or a mistake in the config."""
    return isinstance(error, RenewalError) or isinstance(error.__cause__, ConfigError)


def _what(error: RoleError) -> str:
    return error.message.partition("\n")[0]

"""Profile some steps of a run (`colocate run --profile`)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from colocate.errors import ColocateError, ConfigError
from colocate.texts import did_you_mean, format_error

if TYPE_CHECKING:
    from colocate.driver import ColocatedGroup, Driver

_WORDS = ("memory", "py-spy")
_KEYS = ("steps", "roles", "ranks", *_WORDS)
_NEVER = sys.maxsize


@attrs.frozen
class ProfileRequest:
    """A parsed request of the option `--profile`.

    Attributes:
        first: The first step.
        last: The last step, inclusive.
        roles: The roles; None for all workers of the config.
        ranks: The roles' ranks; None for all.
        memory: Whether to take memory snapshots.
        sampler: The profiler: "torch" or "py-spy".
    """

    first: int
    last: int
    roles: tuple[str, ...] | None = None
    ranks: tuple[int, ...] | None = None
    memory: bool = False
    sampler: str = "torch"

    @classmethod
    def parse(cls, text: str) -> ProfileRequest:
        """Parse a request such as "steps=3:5,roles=actor,critic,memory".

        Raises:
            ConfigError: The text is malformed.
        """
        options: dict[str, list[str]] = {}
        key = ""
        for word in text.split(","):
            name, equals, value = word.strip().partition("=")
            if equals or name in _WORDS:
                key = name
                if key not in _KEYS or key in options:
                    wrong = "twice" if key in options else f"unknown{did_you_mean(key, _KEYS)}"
                    raise ConfigError(f"--profile {text}: {key!r} is {wrong}; it is like steps=3:5,roles=actor")
                options[key] = [value] if equals else []
            elif key in ("roles", "ranks") and name:
                options[key].append(name)
            else:
                raise ConfigError(f"--profile {text}: {word!r} says nothing; it is like steps=3:5,roles=actor,memory")
        sampled = "py-spy" in options  # py-spy's samples are small enough for a whole run.
        first, _, last = (options.get("steps") or [f"0:{_NEVER}" if sampled else ""])[0].partition(":")
        numbers = [first, last or first, *options.get("ranks", ())]
        if not all(number.isdecimal() for number in numbers):
            raise ConfigError(f"--profile {text}: steps and ranks are whole numbers, as steps=3:5,ranks=0")
        if int(numbers[0]) > int(numbers[1]):
            raise ConfigError(f"--profile {text}: the first step comes after the last one")
        ranks = tuple(int(number) for number in options["ranks"]) if "ranks" in options else None
        roles = tuple(options["roles"]) if "roles" in options else None
        sampler = "py-spy" if sampled else "torch"
        return cls(int(first), int(last or first), roles, ranks, "memory" in options, sampler)


class StepProfile:
    """A profile of some steps of a run, from the log of the preceding step to the log of the last step."""

    def __init__(
        self, wanted: ProfileRequest, driver: Driver, groups: Mapping[str, ColocatedGroup], say: Callable[[str], object]
    ) -> None:
        """Check the request, and start the profile at once if step 0 is included.

        Raises:
            ConfigError: A role or a rank doesn't exist.
            CapabilityError: The workers can't be profiled.
        """
        self._request, self._driver, self._say = wanted, driver, say
        self._groups = [*groups.values()]
        self._options: dict[str, Any] = {"roles": wanted.roles, "ranks": wanted.ranks, "memory": wanted.memory}
        self._options["sampler"] = wanted.sampler
        driver.profile(self._groups, **self._options)
        self._open: contextlib.ExitStack | None = None
        self._is_over = False
        if wanted.first == 0:
            self._start(0)

    def on_step(self, step: int) -> None:
        """Start or end the profile after a step was logged."""
        if self._open is not None:
            if step >= self._request.last:
                self._finish()
        elif not self._is_over and step >= self._request.last:
            self._is_over = True
            self._say(
                f"nothing was profiled: step {step} is the first that was logged, and steps=0 begins with the job"
            )
        elif not self._is_over and step + 1 >= self._request.first:
            self._start(step + 1)

    def close(self) -> None:
        """End the profile at the end of the run."""
        if self._open is not None:
            self._finish()
        elif not self._is_over:
            self._say(f"nothing was profiled: the run has ended before its step {self._request.first}")

    def discard(self) -> None:
        """Drop the profile of a failed run."""
        stack, self._open = self._open, None
        if stack is not None:
            with contextlib.suppress(_ProfileDiscarded):
                stack.__exit__(_ProfileDiscarded, _ProfileDiscarded(), None)

    def _start(self, step: int) -> None:
        self._open = contextlib.ExitStack()
        last = self._request.last
        title = f"Profile of step {step}" if step == last else f"Profile of steps {step} to {last}"
        title = "Profile of the run" if last == _NEVER else title
        try:
            self._profile = self._open.enter_context(self._driver.profile(self._groups, title, **self._options))
        except (ColocateError, TimeoutError) as error:  # Don't raise: the job's calls raise it, too.
            self._open, self._is_over = None, True
            self._say(f"nothing is profiled: {format_error(error)}")

    def _finish(self) -> None:
        stack, self._open, self._is_over = self._open, None, True
        assert stack is not None
        try:
            stack.close()
        except (ColocateError, TimeoutError, OSError) as error:
            self._say(f"the profile is lost: {format_error(error)}")
        else:
            self._say(f"profile of {self._profile.seconds:.2f} s, for ui.perfetto.dev: {self._profile.trace}")


class _ProfileDiscarded(Exception):
    """Raised to end a dropped profile's block."""

"""Check numeric options against limits, because a run with a number beyond a limit would learn nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from colocate import ConfigError


@attrs.frozen
class Limit:
    """A range of valid numbers for an option.

    Attributes:
        text: The range in words, for the error text.
        least: The smallest number.
        most: The largest number.
        is_exclusive: Whether `least` itself is refused.
    """

    text: str
    least: int = 0
    most: float = sys.float_info.max
    is_exclusive: bool = False

    def problem(self, value: Any) -> str | None:
        """Return an error text if the value is a number outside the range, else None."""
        if not isinstance(value, int | float):
            return None
        fits = self.least < value if self.is_exclusive else self.least <= value
        return None if fits and value <= self.most else f"must be {self.text}, not {value}"


COUNT = Limit("1 or more", least=1)
AMOUNT = Limit("0 or more")
SHARE = Limit("from 0 to 1", most=1)
POSITIVE = Limit("a finite number above 0", is_exclusive=True)
BOUND = Limit("above 0 (.inf for no bound)", is_exclusive=True, most=math.inf)


def limit_problems(options: Mapping[str, Any], limits: Mapping[str, Limit]) -> Iterator[tuple[str, str]]:
    """Yield the name and an error text for each option that exceeds a limit."""
    for name, limit in limits.items():
        if (problem := limit.problem(options[name])) is not None:
            yield name, problem


def refuse_options(owner: str, wrong: Iterable[tuple[str, str]]) -> None:
    """Raise an error for the first wrong option of a job or a role.

    Raises:
        ConfigError: There is a wrong option.
    """
    for option, problem in wrong:
        raise ConfigError(f"{owner}: option `{option}` {problem}")

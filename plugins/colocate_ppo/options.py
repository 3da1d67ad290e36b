"""Limits of numeric options: a run with numbers beyond these limits would go on and learn nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from colocate import ConfigError


@attrs.frozen
class Limit:
    """The numbers that an option takes.

    Attributes:
        text: The numbers in words.
        least: The least one.
        most: The largest one.
        above: Whether `least` itself is refused.
    """

    text: str
    least: int = 0
    most: float = sys.float_info.max
    above: bool = False

    def problem(self, value: Any) -> str | None:
        """Return the problem of a number as text; None for a good one, and for values of other kinds."""
        if not isinstance(value, int | float):
            return None
        fits = self.least < value if self.above else self.least <= value
        return None if fits and value <= self.most else f"must be {self.text}, not {value}"


COUNT = Limit("1 or more", least=1)
AMOUNT = Limit("0 or more")
SHARE = Limit("from 0 to 1", most=1)
POSITIVE = Limit("a finite number above 0", above=True)
BOUND = Limit("above 0 (.inf for no bound)", above=True, most=math.inf)


def beyond_limits(options: Mapping[str, Any], limits: Mapping[str, Limit]) -> Iterator[tuple[str, str]]:
    """Yield the name and the problem of each option beyond a limit."""
    for name, limit in limits.items():
        if (problem := limit.problem(options[name])) is not None:
            yield name, problem


def refuse(owner: str, wrong: Iterable[tuple[str, str]]) -> None:
    """Refuse options of a job or a role.

    Raises:
        ConfigError: There is a wrong option; the first one is named.
    """
    for option, problem in wrong:
        raise ConfigError(f"{owner}: option `{option}` {problem}")

"""Limits of numbers among options: beyond them a run would go on and learn nothing, so they are refused by name."""

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
        """Return what is wrong with a number, in words; None when nothing is, or it is no number."""
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
    """Yield the options whose numbers are beyond their limits, and why."""
    for name, limit in limits.items():
        if (problem := limit.problem(options[name])) is not None:
            yield name, problem


def refuse(owner: str, wrong: Iterable[tuple[str, str]]) -> None:
    """Refuse options of a job or a role.

    Raises:
        ConfigError: The first of them that is wrong.
    """
    for option, problem in wrong:
        raise ConfigError(f"{owner}: option `{option}` {problem}")

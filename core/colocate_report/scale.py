"""Numbers as people read them, and the ticks of an axis."""

from __future__ import annotations

import math

import attrs

_NOTHING = 1e-300  # a range below this can't be divided into ticks: numbers so small have no digits left
_CONSTANT = 1e-4  # a range below this part of the largest value is drawn as nearly constant


@attrs.frozen
class Axis:
    """A range of values, drawn from 0 to 100 %."""

    low: float  # the value at 0 %
    high: float  # the value at 100 %; above `low`
    ticks: tuple[float, ...]  # values to label, ascending, inside the range

    @classmethod
    def around(cls, low: float, high: float, count: int) -> Axis:
        """An axis of about `count` round ticks, the first and last of which are its ends.

        Nearly constant values get a wider axis: rounding isn't drawn as a slope, and labels are short.
        """
        largest = max(abs(low), abs(high))
        if high - low < max(_CONSTANT * largest, _NOTHING):
            room = largest * (0.1 if high - low < _NOTHING else _CONSTANT)
            room = 1.0 if room < _NOTHING else room
            low, high = low - room, high + room
        step = _round_step((high - low) / count)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return cls(first * step, last * step, tuple(n * step for n in range(first, last + 1)))

    @classmethod
    def within(cls, low: float, high: float, count: int, *, whole: bool = False) -> Axis:
        """An axis with just these ends and about `count` round ticks inside."""
        if high - low < _NOTHING:
            high = low + 1.0
        step = _round_step((high - low) / count)
        if whole:
            step = max(1.0, step)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return cls(low, high, tuple(n * step for n in range(first, last + 1)))

    def at(self, value: float) -> float:
        """Where a value lies, from 0 to 1, at an end when it is outside."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def labels(self) -> tuple[str, ...]:
        """The ticks' numbers, all with the same number of decimals."""
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else abs(self.ticks[0] if self.ticks else 1) or 1
        largest = max(map(abs, self.ticks), default=0.0)
        if largest >= 1e6 or 0 < largest < 1e-3:  # with the digits that tell one from the next
            digits = max(3, 1 + math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9))
            return tuple(_minus(f"{tick:.{digits}g}") for tick in self.ticks)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return tuple(_minus(f"{tick + 0.0:.{decimals}f}") for tick in self.ticks)  # + 0.0: no -0 for a reader


def number(value: float) -> str:
    """A number with four digits that count."""
    if isinstance(value, int) and abs(value) < 10**15:
        return _minus(f"{value:,}")
    return _minus(f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}")


def duration(seconds: float) -> str:
    """A time span in the unit that suits its length."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-6 else "0 ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def offset(seconds: float, longest: float) -> str:
    """A moment of a run on an axis that ends at `longest`: the unit is the same all along."""
    for limit, divisor, unit in ((1.0, 1e-3, "ms"), (180.0, 1.0, "s"), (10800.0, 60.0, "min")):
        if longest < limit:
            return f"{seconds / divisor:.4g} {unit}"
    return f"{seconds / 3600:.4g} h"


def time_ticks(longest: float, count: int) -> tuple[tuple[float, str], ...]:
    """Ticks of a time axis from 0: where each lies, in %, and its label."""
    if longest <= 0:
        return ()
    unit = 1.0 if longest < 180 else 60.0 if longest < 10800 else 3600.0
    axis = Axis.within(0.0, longest / unit, count)
    return tuple((percent(axis.at(tick)), offset(tick * unit, longest)) for tick in axis.ticks)


def percent(fraction: float) -> float:
    """A fraction as a CSS percentage, as short as the eye allows."""
    return round(fraction * 100, 2)


def words(name: str) -> str:
    """A metric's or phase's name for people."""
    known = {"kl": "KL", "lr": "learning rate", "grad": "gradient", "eval": "held-out"}
    text = " ".join(known.get(part, part) for part in name.replace("/", " ").replace("_", " ").split())
    return (text[:1].upper() + text[1:]) or name


def shorten(text: str, limit: int) -> str:
    """The text, or its beginning and how much is left out."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def _minus(text: str) -> str:
    return f"\u2212{text[1:]}" if text.startswith("-") else text


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that isn't below."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))

"""Format numbers for readers, and choose the ticks of an axis."""

from __future__ import annotations

import math

import attrs

_NOTHING = 1e-300  # A smaller range is too small for ticks.
_CONSTANT = 1e-4  # Values with a smaller relative range are drawn as nearly constant.


@attrs.frozen
class Axis:
    """An axis of a chart: a range of values, with ticks."""

    low: float  # The value at 0 % of the axis.
    high: float  # The value at 100 % of the axis, which is above `low`.
    ticks: tuple[float, ...]  # The values with labels, in ascending order.

    @classmethod
    def with_round_ends(cls, low: float, high: float, count: int) -> Axis:
        """Return an axis of about `count` round ticks that begins and ends at a tick.

        Nearly constant values get a wider axis, so that rounding isn't drawn as a slope, and labels are short.
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
    def with_ends(cls, low: float, high: float, count: int, *, whole: bool = False) -> Axis:
        """Return an axis with exactly these ends and about `count` round ticks inside."""
        if high - low < _NOTHING:
            high = low + 1.0
        step = _round_step((high - low) / count)
        if whole:
            step = max(1.0, step)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return cls(low, high, tuple(n * step for n in range(first, last + 1)))

    def position(self, value: float) -> float:
        """Return the place of a value, from 0 to 1; values outside of the range are clipped."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def tick_labels(self) -> tuple[str, ...]:
        """Return the labels of the ticks, all with the same number of decimals."""
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else abs(self.ticks[0] if self.ticks else 1) or 1
        largest = max(map(abs, self.ticks), default=0.0)
        if largest >= 1e6 or 0 < largest < 1e-3:  # Use enough digits to tell neighbouring ticks apart.
            digits = max(3, 1 + math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9))
            return tuple(_use_minus_sign(f"{tick:.{digits}g}") for tick in self.ticks)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return tuple(
            _use_minus_sign(f"{tick + 0.0:.{decimals}f}") for tick in self.ticks
        )  # Adding 0.0 turns -0 into 0.


def format_number(value: float) -> str:
    """Format a number with four significant digits."""
    if isinstance(value, int) and abs(value) < 10**15:
        return _use_minus_sign(f"{value:,}")
    return _use_minus_sign(f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}")


def format_duration(seconds: float) -> str:
    """Format a duration in seconds with a suitable unit."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-6 else "0 ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_offset(seconds: float, longest: float) -> str:
    """Format a time on a time axis, in the unit that suits an axis up to `longest` seconds."""
    for limit, divisor, unit in ((1.0, 1e-3, "ms"), (180.0, 1.0, "s"), (10800.0, 60.0, "min")):
        if longest < limit:
            return f"{seconds / divisor:.4g} {unit}"
    return f"{seconds / 3600:.4g} h"


def make_time_ticks(longest: float, count: int) -> tuple[tuple[float, str], ...]:
    """Return the place in % and the label of each tick on a time axis that starts at 0."""
    if longest <= 0:
        return ()
    unit = 1.0 if longest < 180 else 60.0 if longest < 10800 else 3600.0
    axis = Axis.with_ends(0.0, longest / unit, count)
    return tuple((format_percent(axis.position(tick)), format_offset(tick * unit, longest)) for tick in axis.ticks)


def format_percent(fraction: float) -> float:
    """Return a fraction as a CSS percentage with two decimals."""
    return round(fraction * 100, 2)


def humanize(name: str) -> str:
    """Convert the name of a metric or phase to readable words."""
    special = {"kl": "KL", "lr": "learning rate", "grad": "gradient", "eval": "held-out"}
    text = " ".join(special.get(part, part) for part in name.replace("/", " ").replace("_", " ").split())
    return (text[:1].upper() + text[1:]) or name


def shorten_text(text: str, limit: int) -> str:
    """Cut a text after `limit` characters, and append the number of the remaining characters."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def _use_minus_sign(text: str) -> str:
    return f"\u2212{text[1:]}" if text.startswith("-") else text


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that isn't below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))

"""Compares two values, and reports the place of the first difference and the size of all differences."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from colocate._system.imported import find_imported
from colocate.features.recordings.values import named_parts


class ErrorText(str):
    """The text of an error, used as the result of a call that raised the error."""

    __slots__ = ()


@attrs.define
class Difference:
    """The differences of a value from the recorded value.

    Attributes:
        tolerance: The allowed distance of numbers, absolute or relative.
        count: The number of differing numbers, or other parts.
        total: The number of compared parts.
        absolute: The largest absolute difference of numbers.
        relative: The largest difference relative to the recorded number.
        size: The size of the largest difference: for numbers the smaller of absolute and relative, infinity otherwise.
        first: A text with the place of the first difference and both values; None without a difference.
    """

    tolerance: float = 0.0
    count: int = 0
    total: int = 0
    absolute: float = 0.0
    relative: float = 0.0
    size: float = 0.0
    first: str | None = None

    def compare_parts(self, was: Any, now: Any, path: str = "") -> None:
        """Compare a part of the recorded value with the same part of the new value, and update the counts."""
        torch, numpy = find_imported("torch"), find_imported("numpy")
        arrays = () if numpy is None else (numpy.ndarray, numpy.generic)
        if torch is not None and isinstance(was, torch.Tensor) and isinstance(now, torch.Tensor):
            self._compare_tensors(torch, was, now, path)
        elif type(was) is not type(now) and not ({type(was), type(now)} <= {int, float, bool}):
            self._count_part(False, path, f"{_describe_kind(was)}, and is {_describe_kind(now)}")
        elif numpy is not None and isinstance(was, arrays):
            before, after = numpy.asarray(was), numpy.asarray(now)
            if before.shape != after.shape or before.dtype.newbyteorder("=") != after.dtype.newbyteorder("="):
                self._count_part(False, path, f"{_describe_layout(before)}, and is {_describe_layout(after)}")
            else:
                self._compare_arrays(before, after, path)
        elif isinstance(was, float | int | complex) and not isinstance(was, bool):
            self._compare_numbers(was, now, path)
        elif (parts := named_parts(was)) is not None:
            self._compare_items(parts, named_parts(now) or {}, path)
        elif isinstance(was, dict):
            before, after = ({f"[{key!r}]": part for key, part in value.items()} for value in (was, now))
            self._compare_items(before, after, path)
        elif isinstance(was, list | tuple | deque):
            if len(was) != len(now):
                self._count_part(False, path, f"of {len(was)}, and is of {len(now)}")
            for index, (one, other) in enumerate(zip(was, now, strict=False)):
                self.compare_parts(one, other, f"{path}[{index}]")
        elif isinstance(was, str | bytes):
            self._count_part(was == now, path, _show_difference(was, now))
        else:
            is_same = bool(was == now) or bool(was != was and now != now)
            if not is_same and isinstance(was, set | frozenset):  # Compare texts, in which a NaN equals a NaN.
                is_same = sorted(map(repr, was)) == sorted(map(repr, now))
            self._count_part(is_same, path, f"{was!r:.60}, and is {now!r:.60}")

    def _compare_items(self, before: dict[str, Any], after: dict[str, Any], path: str) -> None:
        for name in dict.fromkeys([*before, *after]):
            if name not in before or name not in after:
                self._count_part(False, path + name, "there, and isn't" if name in before else "not there, and is")
            else:
                self.compare_parts(before[name], after[name], path + name)

    def _count_part(self, is_same: bool, path: str, words: str, size: float = math.inf) -> None:
        self.total += 1
        if not is_same:
            self.count += 1
            self.size = max(self.size, size)
            if self.first is None:
                self.first = f"its value{path} was {words}"

    def _compare_numbers(self, was: Any, now: Any, path: str) -> None:
        if was == now or (was != was and now != now):
            self.total += 1
            return
        try:
            away = float(abs(now - was))
            relative = away / abs(was) if was else math.inf
        except OverflowError:  # The int is too large for a float.
            away = relative = math.inf
        away, relative = (math.inf if number != number else number for number in (away, relative))
        self.absolute, self.relative = max(self.absolute, away), max(self.relative, relative)
        is_near = away <= self.tolerance or relative <= self.tolerance
        self._count_part(is_near, path, f"{was!r}, and is {now!r}", min(away, relative))

    def _compare_tensors(self, torch: Any, was: Any, now: Any, path: str) -> None:
        if was.is_nested and now.is_nested:
            if any(jagged.lengths() is not None or jagged._ragged_idx != 1 for jagged in (was, now)):
                self.compare_parts(
                    [*was.unbind()], [*now.unbind()], path
                )  # Compare the rows of jagged tensors, not the gaps between rows.
                return
            self._compare_tensors(torch, was.values(), now.values(), f"{path}.values()")
            self._compare_tensors(torch, was.offsets(), now.offsets(), f"{path}.offsets()")
            return
        if was.layout != now.layout or was.dtype != now.dtype or was.shape != now.shape:
            self._count_part(False, path, f"{_describe_layout(was)}, and is {_describe_layout(now)}")
            return
        arrays: list[Any] = []
        for tensor in (was, now):
            tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
            # Convert float types that NumPy lacks to float32, which holds the values exactly.
            is_known = not tensor.is_floating_point() or tensor.dtype in (torch.float16, torch.float32, torch.float64)
            arrays.append((tensor if is_known else tensor.float()).numpy())
        self._compare_arrays(arrays[0], arrays[1], path)

    def _compare_arrays(self, was: Any, now: Any, path: str) -> None:
        import numpy

        if was.dtype.names is not None:
            for name in was.dtype.names:
                self._compare_arrays(was[name], now[name], f"{path}[{name!r}]")
            return
        self.total += was.size
        other = was != now
        if was.dtype.kind in "fcmM":
            other &= (was == was) | (now == now)  # A NaN or NaT counts as equal to another NaN or NaT.
        if not bool(other.any()):
            return
        before, after = was[other], now[other]
        far, sizes = numpy.ones(before.shape, bool), numpy.full(before.shape, math.inf)
        if was.dtype.kind in "biufc":
            # The distance of 64-bit integers is rounded, because such integers don't fit into floats.
            wide = complex if was.dtype.kind == "c" else float
            from_, to = before.astype(wide), after.astype(wide)
            with numpy.errstate(all="ignore"):
                away = abs(to - from_)
                relative = numpy.where(from_ != 0, away / abs(from_), math.inf)
            sizes = numpy.fmin(away, relative)
            if self.tolerance:
                far = ~((away <= self.tolerance) | (relative <= self.tolerance))
            self.absolute = max(self.absolute, _find_largest(away))
            self.relative = max(self.relative, _find_largest(relative))
        if not bool(far.any()):
            return
        self.count += int(far.sum())
        self.size = max(self.size, _find_largest(sizes[far]))
        if self.first is None:
            at = int(far.argmax())
            index = [int(indices[at]) for indices in other.nonzero()] if other.ndim else []
            self.first = (
                f"its value{path}{index or ''} was {_format_item(before[at])}, and is {_format_item(after[at])}"
            )


def _format_item(value: Any) -> str:
    """Format a NumPy scalar like a Python value; dates and long doubles keep NumPy's format."""
    return str(value) if value.dtype.kind in "mM" or value.dtype.char in "gG" else repr(value.item())


def _describe_layout(value: Any) -> str:
    layout = "" if str(getattr(value, "layout", "torch.strided")) == "torch.strided" else f" {value.layout}"
    return f"{value.dtype} {[*value.shape]}{layout}"


def _describe_kind(value: Any) -> str:
    return f"the error {value}" if isinstance(value, ErrorText) else f"a {type(value).__qualname__}"


def _show_difference(was: Any, now: Any) -> str:
    """Return a text with both values. Long values are cut to a part that starts just before the first difference."""
    pairs = enumerate(zip(was, now, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(was), len(now)))
    begin = max(0, at - 20) if max(len(was), len(now)) > 60 else 0
    words = f"{was[begin : begin + 60]!r}, and is {now[begin : begin + 60]!r}"
    return f"{words}, from place {begin} on" if begin else words


@attrs.frozen
class FirstDifference:
    """The first call with a difference, and a hint where to look for the cause.

    Attributes:
        seq: The call's number in the order of its group.
        begun: The start of the call, in seconds of time.time().
        words: A text such as "role.method, call 3", with the parameter or the weights if these differ.
    """

    seq: int
    begun: float
    words: str


@attrs.define
class MethodComparison:
    """The result of comparing a method on one rank or on all ranks. `ComparedMethod` describes the fields."""

    calls: int = 0
    differ: int = 0
    numbers: int = 0
    different: int = 0
    absolute: float = 0.0
    relative: float = 0.0
    arguments: int = 0
    missing: int = 0
    left: int = 0
    first: str | None = None
    origin: FirstDifference | None = None

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> MethodComparison:
        """Rebuild an instance from the dict of `attrs.asdict`."""
        origin = plain["origin"]
        return cls(**{**plain, "origin": None if origin is None else FirstDifference(**origin)})

    def add_difference(self, difference: Difference, label: str, cause: Cause, seq: int, begun: float) -> str | None:
        """Count the comparison of a call or row, and return a text about the difference, or None if there is none."""
        self.numbers += difference.total
        self.absolute = max(self.absolute, difference.absolute)
        self.relative = max(self.relative, difference.relative)
        if difference.first is None:
            return None
        self.differ += 1
        self.different += difference.count
        if self.origin is None or seq < self.origin.seq:
            self.origin = FirstDifference(seq, begun, cause.origin(label))
        words = f"{label}: {difference.first}; {difference.count} of {difference.total} differ"
        if difference.absolute:
            words += f", by {difference.absolute:.3g} at most, relatively {difference.relative:.3g}"
        return self._set_first(f"{words} ({cause.text})")

    def add_missing(self, label: str, why: str) -> str:
        """Count a call or row that can't be compared, and return a text with the reason."""
        self.missing += 1
        return self._set_first(f"{label}: {why}")

    def _set_first(self, words: str) -> str:
        self.first = self.first or words
        return words


@attrs.frozen
class Cause:
    """The possible cause of a call's difference: inputs that differ from the recorded inputs.

    Attributes:
        where: A text about the first difference of arguments; None without a difference.
        weights: The call before which a sync delivered other weights; None if the weights are equal.
        besides: A text about inputs that weren't compared, such as split arguments.
    """

    where: str | None
    weights: str | None = None
    besides: str = ""

    @property
    def text(self) -> str:
        """A text about the inputs, to be added to a difference in parentheses."""
        if self.where is not None:
            words = f"its arguments differ, too: {self.where}"
        else:
            words = f"its arguments were the same{self.besides if self.weights is None else ''}"
        return words if self.weights is None else f"{words}; its weights differ since the sync before {self.weights}"

    def origin(self, label: str) -> str:
        """Return a text that says where to start to look for the cause."""
        if self.where is not None:
            name = re.match(r"\w*", self.where)
            assert name is not None
            return f"{label}, parameter {name[0]}: it was given something else"
        if self.weights is not None:
            return f"{label}, its weights: the sync before {self.weights}, has brought others"
        return f"{label}: it was given the same{self.besides}"


class DifferenceReporter:
    """Reports the first difference, and later only differences more than ten times as large as the last report."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._notify = tell
        self._reported_size: float | None = None

    def report(self, words: str | None, size: float = 0.0) -> None:
        """Report a difference (`words`) if the size is large enough. If `words` is None, there is no difference."""
        if words is not None and (self._reported_size is None or size > _GROWTH * self._reported_size):
            self._reported_size = size
            self._notify(words)


_GROWTH = 10


def add_left(methods: dict[str, MethodComparison], calls: Iterable[tuple[str, int]]) -> dict[str, MethodComparison]:
    """Set `left`, the number of recorded calls that haven't been made yet, in the results of each method."""
    counts = Counter(method for method, _ in calls)
    for method in (*methods, *counts):
        methods.setdefault(method, MethodComparison()).left = counts[method]
    return methods


def _find_largest(numbers: Any) -> float:
    """Return the largest number, or infinity if there is a NaN."""
    largest = float(numbers.max())
    return math.inf if math.isnan(largest) else largest

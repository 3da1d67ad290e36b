"""Where two values differ, and how much."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import attrs

from colocate._system.imported import imported
from colocate.features.recordings.values import named_parts


class Raised(str):
    """An error in words, in the place of what a call that raised it would have given."""

    __slots__ = ()


@attrs.define
class Difference:
    """How a value differs from one that was recorded.

    Attributes:
        tolerance: How far numbers may be away, absolutely and relatively.
        count: How many numbers, or other parts, differ.
        total: How many there are.
        absolute: The largest absolute difference of numbers.
        relative: The largest one relative to what was recorded.
        first: Where it differs first, and how; None where it doesn't.
    """

    tolerance: float = 0.0
    count: int = 0
    total: int = 0
    absolute: float = 0.0
    relative: float = 0.0
    first: str | None = None

    def add(self, was: Any, now: Any, path: str = "") -> None:
        """Compare a part."""
        torch, numpy = imported("torch"), imported("numpy")
        arrays = () if numpy is None else (numpy.ndarray, numpy.generic)
        if torch is not None and isinstance(was, torch.Tensor) and isinstance(now, torch.Tensor):
            self._tensors(torch, was, now, path)
        elif type(was) is not type(now) and not ({type(was), type(now)} <= {int, float, bool}):
            self._part(False, path, f"{_kind(was)}, and is {_kind(now)}")
        elif isinstance(was, arrays):
            before, after = numpy.asarray(was), numpy.asarray(now)
            if before.shape != after.shape or before.dtype.newbyteorder("=") != after.dtype.newbyteorder("="):
                self._part(False, path, f"{_layout(before)}, and is {_layout(after)}")
            else:
                self._arrays(before, after, path)
        elif isinstance(was, float | int | complex) and not isinstance(was, bool):
            self._number(was, now, path)
        elif (parts := named_parts(was)) is not None:
            self._parts(parts, named_parts(now) or {}, path)
        elif isinstance(was, dict):
            before, after = ({f"[{key!r}]": each for key, each in value.items()} for value in (was, now))
            self._parts(before, after, path)
        elif isinstance(was, list | tuple | deque):
            if len(was) != len(now):
                self._part(False, path, f"of {len(was)}, and is of {len(now)}")
            for index, (one, other) in enumerate(zip(was, now, strict=False)):
                self.add(one, other, f"{path}[{index}]")
        elif isinstance(was, str | bytes):
            self._part(was == now, path, _apart(was, now))
        else:
            is_same = bool(was == now) or bool(was != was and now != now)
            self._part(is_same, path, f"{was!r:.60}, and is {now!r:.60}")

    def _parts(self, before: dict[str, Any], after: dict[str, Any], path: str) -> None:
        for name in dict.fromkeys([*before, *after]):
            if name not in before or name not in after:
                self._part(False, path + name, "there, and isn't" if name in before else "not there, and is")
            else:
                self.add(before[name], after[name], path + name)

    def _part(self, is_same: bool, path: str, words: str) -> None:
        self.total += 1
        if not is_same:
            self.count += 1
            if self.first is None:
                self.first = f"its value{path} was {words}"

    def _number(self, was: Any, now: Any, path: str) -> None:
        if was == now or (was != was and now != now):
            self.total += 1
            return
        try:
            away = float(abs(now - was))
            relative = away / abs(was) if was else math.inf
        except OverflowError:  # whole numbers have no end
            away = relative = math.inf
        away, relative = (math.inf if each != each else each for each in (away, relative))
        self.absolute, self.relative = max(self.absolute, away), max(self.relative, relative)
        is_near = away <= self.tolerance or relative <= self.tolerance
        self._part(is_near, path, f"{was!r}, and is {now!r}")

    def _tensors(self, torch: Any, was: Any, now: Any, path: str) -> None:
        if was.is_nested and now.is_nested:
            self._tensors(torch, was.values(), now.values(), f"{path}.values()")
            self._tensors(torch, was.offsets(), now.offsets(), f"{path}.offsets()")
            return
        if was.layout != now.layout or was.dtype != now.dtype or was.shape != now.shape:
            self._part(False, path, f"{_layout(was)}, and is {_layout(now)}")
            return
        arrays: list[Any] = []
        for tensor in (was, now):
            tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
            # NumPy doesn't know some types of numbers, which 32 bits hold exactly.
            is_known = not tensor.is_floating_point() or tensor.dtype in (torch.float16, torch.float32, torch.float64)
            arrays.append((tensor if is_known else tensor.float()).numpy())
        self._arrays(arrays[0], arrays[1], path)

    def _arrays(self, was: Any, now: Any, path: str) -> None:
        import numpy

        if was.dtype.names is not None:
            for name in was.dtype.names:
                self._arrays(was[name], now[name], f"{path}[{name!r}]")
            return
        self.total += was.size
        other = was != now
        if was.dtype.kind in "fcmM":
            other &= (was == was) | (now == now)  # NaN and NaT are as they were
        if not bool(other.any()):
            return
        before, after = was[other], now[other]
        far = numpy.ones(before.shape, bool)
        if was.dtype.kind in "biufc":
            # Whole numbers of 64 bits aren't all floats: which differ is known, how far is told as nearly as can be.
            wide = complex if was.dtype.kind == "c" else float
            from_, to = before.astype(wide), after.astype(wide)
            with numpy.errstate(all="ignore"):
                away = abs(to - from_)
                relative = numpy.where(from_ != 0, away / abs(from_), math.inf)
            if self.tolerance:
                far = ~((away <= self.tolerance) | (relative <= self.tolerance))
            self.absolute = max(self.absolute, _largest(away))
            self.relative = max(self.relative, _largest(relative))
        if not bool(far.any()):
            return
        self.count += int(far.sum())
        if self.first is None:
            at = int(far.argmax())
            index = [int(each[at]) for each in other.nonzero()] if other.ndim else []
            self.first = f"its value{path}{index or ''} was {_item(before[at])}, and is {_item(after[at])}"


def _item(value: Any) -> str:
    """Return a number or text of NumPy's as Python writes it; a date, or a number that Python lacks, as NumPy does."""
    return str(value) if value.dtype.kind in "mM" or value.dtype.char in "gG" else repr(value.item())


def _layout(value: Any) -> str:
    """Return the type and shape of a tensor or an array."""
    layout = "" if str(getattr(value, "layout", "torch.strided")) == "torch.strided" else f" {value.layout}"
    return f"{value.dtype} {[*value.shape]}{layout}"


def _kind(value: Any) -> str:
    return f"the error {value}" if isinstance(value, Raised) else f"a {type(value).__qualname__}"


def _apart(was: Any, now: Any) -> str:
    """Return what texts were and are; of long ones from a little before the place where they differ first."""
    pairs = enumerate(zip(was, now, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(was), len(now)))
    begin = max(0, at - 20) if max(len(was), len(now)) > 60 else 0
    words = f"{was[begin : begin + 60]!r}, and is {now[begin : begin + 60]!r}"
    return f"{words}, from place {begin} on" if begin else words


@attrs.define
class Compared:
    """What came of comparing a method, on a rank or of all; the fields are those of `ComparedMethod`."""

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

    def add(self, difference: Difference, label: str, cause: str) -> str | None:
        """Take what came of comparing a call, or a row; return it in words, None where nothing differs."""
        self.numbers += difference.total
        self.absolute = max(self.absolute, difference.absolute)
        self.relative = max(self.relative, difference.relative)
        if difference.first is None:
            return None
        self.differ += 1
        self.different += difference.count
        words = f"{label}: {difference.first}; {difference.count} of {difference.total} differ"
        if difference.absolute:
            words += f", by {difference.absolute:.3g} at most, relatively {difference.relative:.3g}"
        return self._told(f"{words} ({cause})")

    def lack(self, label: str, why: str) -> str:
        """Take that a call, or a row, can't be compared; return why, in words."""
        self.missing += 1
        return self._told(f"{label}: {why}")

    def _told(self, words: str) -> str:
        self.first = self.first or words
        return words


def with_left(methods: dict[str, Compared], calls: Iterable[tuple[str, int]]) -> dict[str, Compared]:
    """Return what came of methods, with the calls that were recorded and haven't come."""
    counts = Counter(method for method, _ in calls)
    for method in (*methods, *counts):
        methods.setdefault(method, Compared()).left = counts[method]
    return methods


def cause_of(where: str | None, besides: str = "") -> str:
    """Return whether arguments were the same, or where they differ first, as what a difference may come of."""
    return f"its arguments were the same{besides}" if where is None else f"its arguments differ, too: {where}"


def _largest(numbers: Any) -> float:
    """Return the largest number; infinity where one is none."""
    found = float(numbers.max())
    return math.inf if math.isnan(found) else found

"""Where two values differ, and how much."""

from __future__ import annotations

import math
from typing import Any

import attrs

from colocate._definitions.structure import named, structure_of
from colocate._system.imported import imported
from colocate._values.leaving import fields


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
        if numpy is not None and isinstance(was, numpy.ndarray) and isinstance(now, numpy.ndarray):
            if was.dtype == now.dtype and was.dtype.kind in "biufc" and torch is not None:
                was, now = torch.as_tensor(was), torch.as_tensor(now)
            else:
                self._part(was.shape == now.shape and bool((was == now).all()), path, f"{was!r}, and is {now!r}")
                return
        if torch is not None and isinstance(was, torch.Tensor) and isinstance(now, torch.Tensor):
            self._tensors(torch, was, now, path)
        elif type(was) is not type(now) and not ({type(was), type(now)} <= {int, float, bool}):
            self._part(False, path, f"a {type(was).__qualname__}, and is a {type(now).__qualname__}")
        elif isinstance(was, float | int | complex) and not isinstance(was, bool):
            self._number(was, now, path)
        elif (structure := structure_of(type(was))) is not None:
            self._parts(dict(named(structure.open(was))), dict(named(structure.open(now))), path)
        elif fields(type(was)):
            before, after = ({f".{name}": getattr(each, name) for name in fields(type(was))} for each in (was, now))
            self._parts(before, after, path)
        elif isinstance(was, dict):
            before, after = ({f"[{key!r}]": each for key, each in value.items()} for value in (was, now))
            self._parts(before, after, path)
        elif isinstance(was, list | tuple):
            if len(was) != len(now):
                self._part(False, path, f"of {len(was)}, and is of {len(now)}")
            for index, (one, other) in enumerate(zip(was, now, strict=False)):
                self.add(one, other, f"{path}[{index}]")
        else:
            self._part(bool(was == now), path, f"{was!r:.60}, and is {now!r:.60}")

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
        away = abs(now - was)
        relative = away / abs(was) if was else math.inf
        self.absolute, self.relative = max(self.absolute, away), max(self.relative, relative)
        is_near = away <= self.tolerance or relative <= self.tolerance
        self._part(is_near, path, f"{was!r}, and is {now!r}")

    def _tensors(self, torch: Any, was: Any, now: Any, path: str) -> None:
        if was.is_nested and now.is_nested:
            self._tensors(torch, was.values(), now.values(), f"{path}.values()")
            self._tensors(torch, was.offsets(), now.offsets(), f"{path}.offsets()")
            return
        if was.dtype != now.dtype or was.shape != now.shape:
            self._part(False, path, f"{was.dtype} {[*was.shape]}, and is {now.dtype} {[*now.shape]}")
            return
        self.total += was.numel()
        was, now = was.detach().cpu(), now.detach().cpu()
        wide = torch.complex128 if was.is_complex() else torch.float64 if was.is_floating_point() else None
        other = (was != now) if wide is None else ~((was == now) | (was.isnan() & now.isnan()))
        if not bool(other.any()):
            return
        # Whole numbers of 64 bits aren't all floats: which differ is known, how far is told as nearly as that can be.
        before, after = was[other].to(wide or torch.float64), now[other].to(wide or torch.float64)
        away = (after - before).abs()
        relative = torch.where(before != 0, away / before.abs(), math.inf)
        far = ~((away <= self.tolerance) | (relative <= self.tolerance))
        self.absolute = max(self.absolute, _largest(away))
        self.relative = max(self.relative, _largest(relative))
        if not bool(far.any()):
            return
        self.count += int(far.sum())
        if self.first is None:
            at = int(far.nonzero()[0])
            index = [int(each) for each in other.nonzero()[at]]
            numbers = was[other][at].item(), now[other][at].item()
            self.first = f"its value{path}{index or ''} was {numbers[0]!r}, and is {numbers[1]!r}"


def _largest(numbers: Any) -> float:
    """Return the largest number; infinity where one is none."""
    found = float(numbers.max())
    return math.inf if math.isnan(found) else found

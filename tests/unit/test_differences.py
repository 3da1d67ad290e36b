"""Differences of values and of arguments are found in all recorded types, without an error."""

from __future__ import annotations

import copy
import datetime
import decimal
import enum
import math
import pathlib
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from colocate.features.recordings.differences import Difference, ErrorText
from colocate.features.recordings.digests import digest_arguments, find_difference


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Name(str):
    pass


def _difference(was: Any, now: Any, tolerance: float = 0.0) -> Difference:
    found = Difference(tolerance)
    found.compare_parts(was, now)
    return found


_LONG = "a" * 100
POINTS = np.zeros(2, [("obs", "f4", (2,)), ("done", "?"), ("in", [("x", "f8"), ("t", "M8[s]")])])
POINTS["in"]["x"], POINTS["in"]["t"] = math.nan, "NaT"


def _changed(name: str) -> Any:
    found = POINTS.copy()
    (found["in"] if name == "x" else found)[name][1] = [7, 0] if name == "obs" else 7
    return found


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        (torch.tensor([7, 2**60]), torch.tensor([7, 2**60 + 1]), f"[1] was {2**60}, and is {2**60 + 1}"),
        (np.array([1, 2], ">i4"), np.array([1, 3], ">i4"), "[1] was 2, and is 3"),
        (np.float32(1), np.float32(2), " was 1.0, and is 2.0"),
        (np.ones(2, "f4"), np.ones(2), " was float32 [2], and is float64 [2]"),
        (np.ones(2), np.ones((2, 1)), " was float64 [2], and is float64 [2, 1]"),
        (np.array([1, 2], "m8[s]"), np.array([1, "NaT"], "m8[s]"), "[1] was 2 seconds, and is NaT"),
        (POINTS, _changed("obs"), "['obs'][1, 0] was 0.0, and is 7.0"),
        (POINTS[1], _changed("x")[1], "['in']['x'] was nan, and is 7.0"),
        (ValueError("a", 1), ValueError("a", 2), ".args[1] was 1, and is 2"),
        (torch.tensor([1.0, 2]).bfloat16(), torch.tensor([1.0, 3]).bfloat16(), "[1] was 2.0, and is 3.0"),
        (deque([torch.arange(3)]), deque([torch.tensor([1, 1, 2])]), "[0][0] was 0, and is 1"),
        (1, 10**400, " was 1, and is 1000"),
        (1.0, math.nan, " was 1.0, and is nan"),
        (_LONG + "b", _LONG + "c", f" was '{'a' * 20}b', and is '{'a' * 20}c', from place 80 on"),
        (b"a", b"b", " was b'a', and is b'b'"),
        (ErrorText("ValueError: no"), {"x": 1}, " was the error ValueError: no, and is a dict"),
        ("ValueError: no", ErrorText("ValueError: no"), " was a str, and is the error ValueError: no"),
        (ErrorText("ValueError: no"), ErrorText("ValueError: yes"), " was 'ValueError: no', and is 'ValueError: yes'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_difference_is_reported(was: Any, now: Any, words: str) -> None:
    found = _difference(was, now)
    assert found.count == 1
    assert found.first is not None
    assert found.first.startswith(f"its value{words}")
    for each in (was, now):
        assert _difference(each, copy.deepcopy(each)).first is None


def test_numbers_of_numpy_are_numbers() -> None:
    assert _difference(np.float32(1), np.float32(1.001), 0.01).first is None
    assert _difference(np.float32("nan"), np.float32("nan")).first is None
    assert _difference(np.float32(1), np.float32(3)).absolute == 2.0


@pytest.mark.parametrize("is_there", [True, False])
def test_arrays_are_compared_without_torch(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays compare alike with and without torch: NaN equals NaN, NaT equals NaT, and the tolerance counts."""
    if not is_there:
        modules = {"numpy": np}
        monkeypatch.setattr("colocate.features.recordings.differences.find_imported", modules.get)
        monkeypatch.setattr("colocate.features.recordings.values.find_imported", modules.get)
    scores = np.array([0.25, math.nan, 1.0, 0.0])
    for tolerance, add, count in ((0.0, 0.0, 0), (1e-3, 1e-6, 0), (1e-3, 1e-2, 3), (0.0, 1e-6, 3)):
        found = _difference(scores, scores + add, tolerance)
        assert (found.count, found.total) == (count, 4)
        assert found.absolute == pytest.approx(add)
        assert _difference({"x": [scores]}, {"x": [scores + add]}, tolerance).count == count
        assert _difference(scores.astype("f4"), (scores + add).astype("f4"), tolerance).count == count
    assert _difference(scores * 1j, scores * 1j).first is None
    assert _difference(POINTS, POINTS.copy()).first is None
    near = POINTS.copy()
    near["obs"] += 1e-6
    assert (_difference(POINTS, near, 1e-3).first, _difference(POINTS, near).count) == (None, 4)
    assert _difference(decimal.Decimal("NaN"), decimal.Decimal("NaN")).first is None


def test_nan_differs_infinitely() -> None:
    for was, now in ((1.0, math.nan), (torch.tensor(1.0), torch.tensor(math.nan)), (math.inf, 1.0)):
        assert (_difference(was, now, 0.5).absolute, _difference(was, now, 0.5).relative) == (math.inf, math.inf)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Colour.RED, Colour.BLUE),
        (pathlib.Path("a"), pathlib.Path("b")),
        (datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 2)),
        (decimal.Decimal(1), decimal.Decimal(2)),
        (deque([1]), deque([2])),
        (torch.float32, torch.float16),
        (np.dtype("f4"), np.dtype("f8")),
        (torch.device("cpu"), torch.device("meta")),
        (Name("a"), Name("b")),
        (1j, 2j),
        (slice(1, 2), slice(1, 3)),
        (range(3), range(4)),
        (int, str),
        (math.sin, math.cos),
        ({"x": [Colour.RED]}, {"x": [Colour.BLUE]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_arguments_of_all_kinds_are_distinguished(one: Any, other: Any) -> None:
    assert find_difference(digest_arguments({"x": one}), digest_arguments({"x": other})) is not None
    assert find_difference(digest_arguments({"x": one}), digest_arguments({"x": copy.deepcopy(one)})) is None

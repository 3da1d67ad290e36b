"""Where values differ, and where arguments do: whatever is recorded is looked into, and nothing of it is an error."""

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

from colocate.features.recordings.differences import Difference, Raised
from colocate.features.recordings.digests import digest_of, first_difference


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Name(str):
    pass


def _difference(was: Any, now: Any, tolerance: float = 0.0) -> Difference:
    found = Difference(tolerance)
    found.add(was, now)
    return found


_LONG = "a" * 100


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        (torch.tensor([7, 2**60]), torch.tensor([7, 2**60 + 1]), f"[1] was {2**60}, and is {2**60 + 1}"),
        (np.array([1, 2], ">i4"), np.array([1, 3], ">i4"), "[1] was 2, and is 3"),
        (np.array([1], "g"), np.array([2], "g"), " was array([1.]"),
        (np.float32(1), np.float32(2), " was 1.0, and is 2.0"),
        (deque([torch.arange(3)]), deque([torch.tensor([1, 1, 2])]), "[0][0] was 0, and is 1"),
        (1, 10**400, " was 1, and is 1000"),
        (1.5, 10**400, " was 1.5, and is 1000"),
        (1.0, math.nan, " was 1.0, and is nan"),
        (_LONG + "b", _LONG + "c", f" was '{'a' * 20}b', and is '{'a' * 20}c', from place 80 on"),
        (_LONG, _LONG + "c", f" was '{'a' * 20}', and is '{'a' * 20}c', from place 80 on"),
        (b"a", b"b", " was b'a', and is b'b'"),
        (Raised("ValueError: no"), {"x": 1}, " was the error ValueError: no, and is a dict"),
        ("ValueError: no", Raised("ValueError: no"), " was a str, and is the error ValueError: no"),
        (Raised("ValueError: no"), Raised("ValueError: yes"), " was 'ValueError: no', and is 'ValueError: yes'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_differs_is_told(was: Any, now: Any, words: str) -> None:
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


def test_how_far_what_is_no_number_is() -> None:
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
def test_arguments_of_all_kinds_are_told_apart(one: Any, other: Any) -> None:
    assert first_difference(digest_of({"x": one}), digest_of({"x": other})) is not None
    assert first_difference(digest_of({"x": one}), digest_of({"x": copy.deepcopy(one)})) is None

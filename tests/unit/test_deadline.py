"""`Deadline`: what is left of it, for what waits and for who looks around meanwhile."""

from __future__ import annotations

import math

import pytest

from colocate._system.deadline import NEVER, Deadline


@pytest.mark.parametrize("seconds", [None, math.inf])
def test_for_ever(seconds: float | None) -> None:
    deadline = Deadline(seconds)
    assert (deadline.left, deadline.is_over, deadline.at_most(3.0)) == (None, False, 3.0)
    assert deadline.before(5.0).left is None


def test_what_is_left() -> None:
    deadline = Deadline(60.0)
    left = deadline.left
    assert left is not None
    assert 0.0 < left <= 60.0
    assert not deadline.is_over
    assert deadline.at_most(3.0) == 3.0
    assert 50.0 < deadline.at_most(100.0) <= 60.0
    assert deadline.before(60.0).is_over


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_over(seconds: float) -> None:
    deadline = Deadline(seconds)
    assert (deadline.left, deadline.is_over, deadline.at_most(3.0)) == (0.0, True, 0.0)


def test_the_first_of_two() -> None:
    sooner, later = Deadline(1.0), Deadline(2.0)
    assert later.or_sooner(sooner) is sooner
    assert sooner.or_sooner(later) is sooner
    assert NEVER.or_sooner(later) is later

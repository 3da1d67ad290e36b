"""The suite for executors itself."""

from __future__ import annotations

from colocate.testing.executors import ExecutorSuite


def test_no_area_hides_a_test_of_another() -> None:
    """Every area's tests are in the whole: no two of them have one name."""
    areas = [area for area in ExecutorSuite.__mro__ if area.__module__.startswith("colocate.testing.executors.")]
    names = [name for area in areas for name in vars(area) if name.startswith("test_")]
    assert len(areas) > 15
    assert sorted(names) == sorted(set(names))

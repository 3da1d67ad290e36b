"""The suite for executors itself."""

from __future__ import annotations

import importlib
import pkgutil

from colocate.testing import executors
from colocate.testing.executors import Executor, ExecutorSuite, Smoke


def test_no_area_hides_a_test_of_another() -> None:
    """Every area's tests are in the whole: none is left out, and no two of them have one name."""
    areas = [area for area in ExecutorSuite.__mro__ if area.__module__.startswith("colocate.testing.executors.")]
    for each in pkgutil.iter_modules(executors.__path__, "colocate.testing.executors."):
        for thing in vars(importlib.import_module(each.name)).values():
            if isinstance(thing, type) and any(name.startswith("test_") for name in vars(thing)):
                assert thing in areas or issubclass(thing, ExecutorSuite), thing
    names = [name for area in areas for name in vars(area) if name.startswith("test_")]
    assert len(areas) > 15
    assert sorted(names) == sorted(set(names))


def test_levels_of_the_suite() -> None:
    """Each has the tests of the one before, and is larger by far; each test is the suite's."""
    smoke, executor, whole = (
        {name for name in dir(level) if name.startswith("test_") and getattr(level, name) is not None}
        for level in (Smoke, Executor, ExecutorSuite)
    )
    assert smoke < executor < whole
    assert 18 <= len(smoke) <= 25
    assert 4 * len(smoke) < len(executor) < len(whole) / 2
    for level, names in ((Smoke, smoke), (Executor, executor)):
        assert all(getattr(level, name) is getattr(ExecutorSuite, name) for name in names)

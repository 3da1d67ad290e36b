"""How much of the suite runs where: core's laws once, on processes, and what an executor does itself on each.

`make test` asks engines of others, and what stands for them, for the tests to begin with; Dask stands for all that is
kept by keepers, and what lies on two machines has tests of its own. Features run on core alone: their tests have
processes, and what threads may do otherwise. `make suites` runs all that the test files ask for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

LEVELS = ("none", "smoke", "executor", "core")
IN_MAKE_TEST = {
    "test_processes": "core",
    "test_threads": "executor",
    "test_dask": "executor",
    "test_two_machines": "none",
}
# Pools without a driver: each test takes several drivers of their own. `make test` has what holds of one that leaves.
DETACHED = ("attaching",)
CORE = ("tests.suite.core.", "colocate.testing.executors.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out, and have `-k` find all tests of an area by its module's name."""
    for item in items:
        function = getattr(item, "function", None)
        if function is None or not function.__module__.startswith(("colocate.testing.", "tests.suite.")):
            continue
        area = function.__module__.removesuffix(".suite").rpartition(".")[2]
        item.extra_keyword_matches.add(area)
        most = IN_MAKE_TEST.get(item.path.stem, "smoke")
        if item.path.stem == "test_dask" and not function.__module__.startswith(CORE):
            most = "smoke"
        if LEVELS.index(_level(function)) > LEVELS.index(most) or area in DETACHED:
            item.add_marker("long")


def _level(function: Callable[..., object]) -> str:
    if function.__module__.startswith("colocate."):
        return "smoke" if hasattr(function, "smoke") else "executor"
    return getattr(function, "level", "core")

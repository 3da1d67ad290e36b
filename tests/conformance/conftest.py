"""How much of the suite runs where in `make test`: each law once, and what an executor does itself on each.

A law that needs no process of its own runs on threads, where it takes milliseconds; what transports, serialises, dies
or signals runs on processes. Engines of others, and what stands for them, run what concerns transport, placement,
death, output and the cluster: of the tests to begin with, or, on Dask, which stands for all that is kept by keepers, of
all that an executor does itself. What lies on two machines has tests of its own. `make suites` runs all laws
everywhere.
"""

from __future__ import annotations

import pytest

WHEEL, SUITE = "colocate.testing.executors.", "tests.suite."
ON_PROCESSES = {
    *("closing", "context", "definitions", "devices", "drivers", "engines", "numbers", "residents", "restarting"),
    *("sharing", "startup", "tensors", "threads"),
}
"""Areas whose laws are of processes, or of values on their way between them."""
OF_CORE = {"calls", "context", "dispatch", "left", "numbers", "order", "ownership", "unasked"}
"""Areas in which core does the same on whatever executor carries its messages."""
# Pools without a driver: each test takes several drivers of their own. `make test` has what holds of one that leaves.
DETACHED = "attaching"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out, and have `-k` find all tests of an area by its module's name."""
    for item in items:
        function = getattr(item, "function", None)
        if function is None or not function.__module__.startswith((WHEEL, SUITE)):
            continue
        area = function.__module__.removesuffix(".suite").rpartition(".")[2]
        item.extra_keyword_matches.add(area)
        if item.path.stem in ("test_processes", "test_threads"):
            item.add_marker(pytest.mark.xdist_group(area))  # they share no fixture that is dear to make
        if area == DETACHED or not _is_in_make_test(item.path.stem, area, function):
            item.add_marker("long")


def _is_in_make_test(file: str, area: str, function: object) -> bool:
    is_of_wheel, is_law = str(function.__module__).startswith(WHEEL), not hasattr(function, "level")
    if file == "test_threads":
        return area != "audits" and (is_of_wheel or (is_law and not _needs_processes(area, function)))
    if file == "test_processes":
        return area != "audits" and (is_of_wheel or not is_law or _needs_processes(area, function))
    if area in OF_CORE or file == "test_two_machines":
        return False
    if file == "test_outpost_hosts":  # beside test_outpost, whose posts aren't started by ssh
        return area in ("deaths", "residents") and hasattr(function, "smoke")
    if file == "test_ray" and area in ("audits", "placement"):  # of which tests/ray has what is its own
        return False
    return is_of_wheel if file == "test_dask" else hasattr(function, "smoke")


def _needs_processes(area: str, function: object) -> bool:
    return area in ON_PROCESSES or hasattr(function, "capability")

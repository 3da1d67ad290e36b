"""The part of the suite that `make test` runs on each executor: each law once, and an executor's own code on each.

A law that needs no process runs on threads, in milliseconds; laws of transport, serialization, deaths and signals run
on processes. Engines, and their stand-ins, run the tests of transport, placement, deaths, output and the cluster: the
smoke tests, or, on Dask, which stands for all executors with keepers, all that an executor does itself. Slots on two
machines have tests of their own. `make suites` runs all laws everywhere.
"""

from __future__ import annotations

import pytest

WHEEL, SUITE = "colocate.testing.executors.", "tests.suite."
ON_PROCESSES = {
    *("closing", "context", "definitions", "devices", "drivers", "engines", "numbers", "residents", "restarting"),
    *("sharing", "startup", "tensors", "threads"),
}
"""Areas whose laws concern processes, or values sent between them."""
OF_CORE = {"calls", "context", "dispatch", "left", "numbers", "order", "ownership", "unasked"}
"""Areas in which core behaves the same on every executor."""
# Pools without a driver: each test starts several drivers. `make test` has the laws of a driver that leaves.
DETACHED = "attaching"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `make test` leaves out, and make `-k` select an area by its module's name."""
    for item in items:
        function = getattr(item, "function", None)
        if function is None or not function.__module__.startswith((WHEEL, SUITE)):
            continue
        area = function.__module__.removesuffix(".suite").rpartition(".")[2]
        item.extra_keyword_matches.add(area)
        if item.path.stem in ("test_processes", "test_threads"):
            item.add_marker(pytest.mark.xdist_group(area))  # these areas share no expensive fixture
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
    if file == "test_outpost_hosts":  # test_outpost has the other areas, without ssh
        return area in ("deaths", "residents") and hasattr(function, "smoke")
    if file == "test_ray" and area in ("audits", "placement"):  # tests/ray covers Ray's own part
        return False
    return is_of_wheel if file == "test_dask" else hasattr(function, "smoke")


def _needs_processes(area: str, function: object) -> bool:
    return area in ON_PROCESSES or hasattr(function, "capability")

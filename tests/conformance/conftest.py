"""Which tests of the suite `make test` leaves out: on engines, most of those that take long and whose laws are core's.

On `local` all of them run, and on each engine a few of each area; `make suites` runs everything everywhere.
"""

from __future__ import annotations

import pytest

LONG = ("attaching", "auditing", "converging", "detaching", "drivers", "endings", "restarting")
ENGINES = {
    "test_ray": LONG,
    "test_dask": LONG,
    # It stands for all executors that others write on the keepers, which Ray and Dask have run above.
    "test_outpost": (*LONG, "borrows", "failures", "forks", "meshes", "pipelines", "process_groups", "tensors"),
}
KEPT = (
    "test_claimed_worker",
    "test_forgotten_group",
    "test_taken_from_a_live_driver",
    "test_goes_on",
    "test_expired_frees_its_slots",
    "test_while_it_reserves",
    "test_killed",
    "test_killed_with_a_fork_alive",
    "test_killed_while[calling]",
    "test_interrupted",
    "test_it_goes_on_from_its_checkpoint",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        area = getattr(item, "function", item).__module__.rpartition(".")[2]
        if area in ENGINES.get(item.path.stem, ()) and item.name not in KEPT:
            item.add_marker("long")

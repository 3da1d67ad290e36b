"""Which tests of the suite `make test` leaves out: on engines, most of those that take long and whose laws are core's.

On `local` nearly all of them run, and on each engine a few of each area; `make suites` runs everything everywhere.
"""

from __future__ import annotations

import pytest

LONG = ("attaching", "auditing", "converging", "detaching", "drivers", "endings", "restarting")
CORE = (
    *("borrows", "cancelling", "closing", "context", "deaths", "dispatch", "failures", "forks", "functions", "meshes"),
    *("order", "pipelines", "process_groups", "residents", "startup"),
)
ENGINES = {
    # Each test has Ray start processes of its own. The keepers in them are those that Dask has, which runs all of it.
    "test_ray": (*LONG, *CORE),
    "test_dask": LONG,
    "test_strict": LONG,  # how messages travel makes no difference there
    # It stands for all executors that others write on the keepers.
    "test_outpost": (*LONG, *CORE),
}
KEPT = (
    *("test_claimed_worker", "test_forgotten_group", "test_taken_from_a_live_driver", "test_goes_on"),
    *("test_expired_frees_its_slots", "test_while_it_reserves", "test_killed", "test_killed_with_a_fork_alive"),
    *("test_killed_while[calling]", "test_interrupted", "test_it_goes_on_from_its_checkpoint"),
    *("test_by_name", "test_hanging_constructor", "test_killed_in_a_call", "test_hung_process", "test_every_error"),
    *("test_hold_in_a_collective", "test_between_slots", "test_between_groups", "test_scatter_then_concat"),
    *("test_role_error", "test_later_call_begun", "test_run_context", "test_pipeline_as_without", "test_facts"),
    *("test_cancel_running", "test_broken_borrow", "test_named_residents_between_meshes"),
)
# SIGTERM and SIGINT at each of six stages; `make test` has SIGKILL at each, and these two at one.
STAGED = "test_ended_while"
KEPT_STAGES = ("test_ended_while[interrupted-calling]", "test_ended_while[terminated-transferring]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        area = getattr(item, "function", item).__module__.rpartition(".")[2]
        of_core = area in ENGINES.get(item.path.stem, ()) and item.name not in KEPT
        staged = item.name.startswith(STAGED) and item.name not in KEPT_STAGES
        if of_core or staged:
            item.add_marker("long")

"""Which tests of the suite `make test` leaves out; `make suites` runs everything everywhere.

What the suite proves of core needs proving once: on threads, and on processes. Where values travel by value is proved
once more, on threads. Of an engine, `make test` asks what it does itself, and can break.
"""

from __future__ import annotations

import pytest

# What there is to prove of values that travel by value.
BY_VALUE = (
    *("borrows", "calls", "checkpoints", "definitions", "dispatch", "failures", "functions", "kept_failures"),
    *("meshes", "mixing", "pipelines", "residents", "serialization", "tensors"),
)
# What processes of this machine can't break where threads don't, but for these tests, and those of every engine.
ON_THREADS = (
    *("borrows", "budgets", "checkpoints", "closing", "converging", "devices", "ownership", "restarting"),
    *("sleeping", "sleeping_beside", "startup", "turns"),
)
ON_PROCESSES = {
    *("test_borrowed", "test_a_checkpoint_is_whole_or_not_there", "test_several_at_once"),
    *("test_arguments_arrive_on_the_device", "test_graph", "test_dropping_closes_nothing"),
    # They end in their own way, by themselves or because somebody sees to it, and new ones take their places.
    *("test_hung_rank", "test_slots_after_a_hung_rank", "test_where_a_silent_rank_is", "test_newest_first"),
    *("test_faulty_ranks", "test_several_that_hang", "test_one_that_hangs_as_it_ends"),
    *("test_who_leaves_slowly_beside_a_hung_rank", "test_a_hung_rank", "test_what_was_pending_is_told_once"),
    # Memory is each process's own.
    *("test_sleep_frees_memory", "test_wake_without_room", "test_restart_of_a_sleeping_role"),
    *("test_roles_take_turns", "test_restart_of_roles_that_take_turns"),
    *("test_random_numbers_go_on", "test_nothing_is_left", "test_every_failure_of_its_own", "test_odd_failures[exit]"),
}
# What ranks meet by, and where it listens.
MEETS = {"test_all_ranks", "test_ports_of_a_range"}
# The engine starts workers, where and with what they were asked for, and tells of those that don't come.
STARTS = {
    *(
        "test_in_one_call",
        "test_by_name",
        "test_dying_constructor",
        "test_hanging_constructor",
        "test_environment",
        "test_facts",
    ),
    *("test_device", "test_threads_of_torch", "test_slots_of_a_pool"),
    *("test_environment_of_a_fork", "test_the_template_is_killed"),
}
# It brings messages and values to them, and to each other.
BRINGS = {
    *("test_plain_call", "test_lane", "test_async_overlap", "test_cancel_running", "test_later_call_begun"),
    *("test_role_error", "test_scatter_then_concat", "test_run_context", "test_pipeline_as_without", "test_values"),
    *("test_class_of_the_script", "test_round_trip", "test_large", "test_shared_storage", "test_no_copy"),
    *("test_optimizer", "test_strict_contents", "test_between_slots", "test_between_groups", "test_broken_borrow"),
    *("test_named_residents_between_meshes", "test_all_ranks", "test_default_group", "test_hold_in_a_collective"),
    *("test_a_failed_step_is_done_again[backward-fsdp2]", "test_sleep_and_wake", "test_turns_are_told"),
}
# It notices that a worker has died, or doesn't answer, and ends what is left of it.
NOTICES = {
    *("test_killed_in_a_call", "test_the_pool_lives", "test_children_of_a_worker[kill]", "test_hung_process"),
    *("test_every_error", "test_it_goes_on_from_its_checkpoint"),
}
# Drivers end in any way, and leave nothing; what it says there is can be compared with what there is.
LEAVES = {
    *("test_killed", "test_killed_with_a_fork_alive", "test_interrupted", "test_while_it_reserves"),
    *("test_executor_is_called_off_the_main_thread", "test_clean_at_each_stage", "test_claimed_worker"),
    *("test_claimed_pool", "test_forgotten_group"),
}
# It keeps slots without a driver. Who has them then, and until when, is decided by a keeper, as Dask shows.
DETACHES = {"test_goes_on", "test_budgets_from_driver_to_driver"}
OF_LEADS = {"test_expired_frees_its_slots", "test_taken_from_a_live_driver"}
# It has slots to give, and GPUs.
RESERVES = {
    *("test_never_fits", "test_does_not_fit_now", "test_waits", "test_close_frees", "test_a_slot_larger_than_a_node"),
    *("test_gpus", "test_visible_gpus", "test_parts_of_a_gpu"),
}
# What is dear on Ray, and is the same on Dask.
ON_DASK = {
    *("test_killed_while[calling]", "test_interrupted_spawn", "test_interrupted_reserve"),
    *("test_slots_after_a_hung_rank", "test_gpus_of_the_job[7,5, 3,9,1]", "test_more_gpus_than_the_job_has"),
}
# Lanes go straight from driver to worker and from worker to worker: once a keeper has passed one on, the rest is
# core's, as Dask shows; elsewhere it is enough that they reach each other.
REACHES = {
    *("test_plain_call", "test_class_of_the_script", "test_round_trip", "test_between_slots", "test_between_groups"),
    *("test_a_failed_step_is_done_again[backward-fsdp2]", "test_sleep_and_wake", "test_turns_are_told"),
}
# What tests/ray has of it, on clusters of its own; and what a keeper says of its worker, in the same words as on Dask.
OF_RAY = {"test_killed", "test_while_it_reserves", "test_gpus", "test_visible_gpus"}
OF_KEEPERS = {"test_hanging_constructor", "test_claimed_worker", "test_forgotten_group", "test_every_error"}
OF_KEEPERS |= {"test_it_goes_on_from_its_checkpoint"}
ON_KEEPERS = (STARTS | REACHES | NOTICES | LEAVES) - OF_KEEPERS
# What is core's on any keeper, and takes a torch for each worker: Dask and processes show how a template's forks start
# and end, and that tensors of every kind come back as they went.
OF_TORCH = {"test_environment_of_a_fork", "test_the_template_is_killed", "test_round_trip"}
# What a driver does itself before its engine hears of it, as on Dask; that one which is killed leaves nothing is asked
# everywhere.
OF_DRIVERS = {"test_interrupted", "test_executor_is_called_off_the_main_thread"}
# What keeps a slot vanishes. That one which is stuck is ended takes as long as its keeper is waited for.
VANISHES = {
    *("test_others_take_the_place_of_a_slot_that_has_vanished", "test_the_engine_tells_why_a_slot_has_vanished"),
    "test_the_slots_of_what_has_vanished_are_given_back",
}
ENGINES = {
    "test_ray": (ON_KEEPERS | DETACHES | RESERVES | MEETS) - OF_RAY - OF_TORCH - OF_DRIVERS,
    "test_dask": STARTS | BRINGS | NOTICES | LEAVES | DETACHES | OF_LEADS | RESERVES | ON_DASK,
    # It stands for all executors that others write on core's keepers and ledger.
    # The same, where its slots lie on two machines: that they reach each other, and the test.
    "test_two_machines": {"test_plain_call", "test_between_slots", "test_killed_in_a_call"},
    "test_outpost": (ON_KEEPERS | VANISHES) - OF_TORCH - OF_DRIVERS,
}
# Threads and processes have no detached pools: Dask stands for core here. A module of other content is
# asked for as one that is imported late.
DETACHED = {"successors"}
BEFORE = "test_a_module_of_other_content"
# SIGTERM and SIGINT at each of six stages; `make test` has SIGKILL at each, and these two at one.
STAGED = "test_ended_while"
KEPT_STAGES = ("test_ended_while[interrupted-calling]", "test_ended_while[terminated-transferring]")
# Models that ranks share: of what a failed step costs `make test` has what differs most, on processes.
RENEWED = (
    *("test_a_failed_step_is_done_again", "test_the_first_step_is_done_again", "test_a_step_that_fails"),
    *("test_weights_of", "test_weights_that_another_role_changes", "test_a_model_made_anew"),
)
KEPT_RENEWALS = {
    *(f"test_a_failed_step_is_done_again[backward-{kind}]" for kind in ("ddp", "fsdp2")),
    *("test_the_first_step_is_done_again[fsdp2]", "test_a_step_that_fails_everywhere[backward-fsdp2]"),
    *(f"test_a_step_that_fails_on_one_slot[backward-{kind}]" for kind in ("ddp", "fsdp2")),
    *("test_weights_of_two_steps[fsdp2]", "test_weights_of_a_later_call"),
    *(f"test_a_model_made_anew{which}" for which in ("[own mesh-meta-True]", "[fsdp2-None-False]", "_by_hand[fsdp2]")),
}


def _is_long(module: str, area: str, name: str) -> bool:
    if name.startswith(STAGED) and name not in KEPT_STAGES:
        return True
    if name.startswith(RENEWED) and name not in KEPT_RENEWALS:
        return True
    if module == "test_processes":
        return area in ON_THREADS and name not in ON_PROCESSES | STARTS | BRINGS | NOTICES
    if module == "test_strict":
        return area not in BY_VALUE
    if module == "test_dask" and area in DETACHED:
        return name == BEFORE
    return module in ENGINES and name not in ENGINES[module]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, and have `-k` find all tests of an area by its module's name."""
    for item in items:
        function = getattr(item, "function", None)
        if function is None or not function.__module__.startswith("colocate.testing.executors."):
            continue
        area = function.__module__.rpartition(".")[2]
        item.extra_keyword_matches.add(area)
        if _is_long(item.path.stem, area, item.name):
            item.add_marker("long")

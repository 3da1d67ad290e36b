"""Plausible mistakes in core, each with the law that the mistake breaks and the one test that has to find it.

More are in `tests/chaos/mutants.py` and in `tests/laws/test_simulator.py`. A mutant's text occurs once in its file:
`test_list.py` checks that.
"""

from __future__ import annotations

import attrs

OF_DRIVERS = ("_api", "_calls", "_owned", "_worker_group")
OF_DRIVERS_HALVES = ("driver.py", "marks.py")  # of features
IN_ONE_PROCESS = ("test_threads.py", "[threads]", "test_simulator.py")


@attrs.frozen
class Mutant:
    """A mistake: a file in which one text is replaced by another."""

    name: str
    law: str
    file: str
    old: str
    new: str
    test: str

    @property
    def is_of_workers(self) -> bool:
        """Whether worker processes import the module, and the test has worker processes."""
        _, _, package, *_, name = self.file.split("/")
        is_of_drivers = package in OF_DRIVERS or (package == "features" and name in OF_DRIVERS_HALVES)
        return not is_of_drivers and not any(each in self.test for each in IN_ONE_PROCESS)


def _on_processes(name: str) -> str:
    return f"tests/conformance/test_processes.py::TestProcesses::{name}"


def _on_threads(name: str) -> str:
    return f"tests/conformance/test_threads.py::TestThreads::{name}"


_CALLS, _WORKER, _DEFINITIONS = "core/colocate/_calls", "core/colocate/worker", "core/colocate/_definitions"
_ORDER, _LANE_ORDER = f"{_CALLS}/order.py", f"{_WORKER}/lane_order.py"
_KEPT, _HANDLES = f"{_CALLS}/residents.py", f"{_CALLS}/handles.py"
_USES, _MEMORY = "core/colocate/_protocol/uses.py", "core/colocate/features/memory"
_SLEEP, _TURNS = f"{_MEMORY}/sleep.py", f"{_MEMORY}/turns.py"
_SIMULATOR = "tests/laws/test_simulator.py::test_order_and_hold"

MUTANTS: dict[str, tuple[Mutant, ...]] = {
    "order": (
        Mutant(
            "withdrawn-stay",
            "A later call that failed where it had begun is withdrawn from the other ranks.",
            _ORDER,
            "to_worker.Resume(hold.number, sorted(hold.withdrawn), hold.lane)",
            "to_worker.Resume(hold.number, [hold.failed], hold.lane)",
            _on_threads("test_later_call_failed"),
        ),
        Mutant(
            "a-sync-amid-a-call",
            "What concerns all roles begins when the background roles stand still.",
            "core/colocate/worker/serving/host.py",
            "if not standing.wait_for_lanes():",
            "if False:",
            _on_threads("test_sync_and_restore_span_all_roles"),
        ),
        Mutant(
            "as-they-come",
            "A result has an item per rank, in the order of ranks, whoever is done first.",
            _ORDER,
            "call.bodies[index] = done.size if body is None else body",
            "call.bodies[len(call.targets) - call.remaining] = done.size if body is None else body",
            "tests/laws/test_order.py::test_calls_keep_one_order_and_none_is_lost[threads]",
        ),
        Mutant(
            "back-while-it-awaits",
            "After a failure calls go on when all ranks are back: none runs an earlier call any more.",
            _LANE_ORDER,
            "            overlapping > self._idle_count\n            or self.last_reported >= self._last_hold",
            "            self.last_reported >= self._last_hold",
            _SIMULATOR,
        ),
        Mutant(
            "awaits-on",
            "What a rank awaits in a call that has failed elsewhere is cancelled.",
            f"{_WORKER}/lane.py",
            "            if first <= seq <= last and self.tasks is not None and work.concurrency:",
            "            if first < seq <= last and self.tasks is not None and work.concurrency:",
            _on_threads("test_async_failing"),
        ),
        Mutant(
            "late-ones-stay",
            "A call that is given up during a hold is withdrawn from the ranks that haven't begun it.",
            _ORDER,
            "            hold.withdrawn.add(call.seq)\n            if hold.suspected is not None and",
            "            if hold.suspected is not None and",
            _SIMULATOR,
        ),
        Mutant(
            "inner-block-takes-outer",
            "A pipeline inside of another one that fails takes its own calls with it, and no others.",
            "core/colocate/features/pipelines/driver.py",
            "outer.abandon_drafts(start, error)",
            "outer.abandon_drafts(0, error)",
            _on_threads("test_pipeline_nested"),
        ),
        Mutant(
            "as-at-the-end",
            "An argument arrives as it was when the call was made, not as it is when the pipeline ends.",
            "core/colocate/features/pipelines/driver.py",
            "        draft.bodies = [snapshots[id(body)] for body in draft.bodies]\n",
            "",
            _on_processes("test_pipeline_arguments_keep_call_time_values"),
        ),
        Mutant(
            "draws-anew",
            "A call that failed on one rank has drawn nothing on any: made again it draws the same.",
            f"{_WORKER}/serving/role_instance.py",
            "if seq not in failed or generator is None:",
            "if seq in failed or generator is None:",
            _on_threads("test_generator_after_a_failure"),
        ),
        Mutant(
            "consequence-first",
            "The caller is told the first failure, and not what has followed from it on another rank.",
            _ORDER,
            "if failure.secondary and hold.root is None and poison is None:",
            "if failure.secondary and hold.root is not None and poison is None:",
            _on_processes("test_death_in_a_collective"),
        ),
    ),
    "residents": (
        Mutant(
            "one-part-on",
            "Plain rows that are scattered beside a resident lie beside the same rows of it.",
            _USES,
            "return sum(sizes[:index]), sum(sizes)",
            "return sum(sizes[: index + 1]), sum(sizes)",
            _on_threads("test_rows_that_turn_out_to_be_too_few"),
        ),
        Mutant(
            "never-forgotten",
            "With the lease the value goes, in every worker.",
            f"{_WORKER}/residents/store.py",
            "self.entries.pop(key, None)",
            "self.entries.get(key, None)",
            _on_processes("test_released_in_the_workers"),
        ),
        Mutant(
            "always-aligned",
            "What is scattered together is cut alike, however two residents lie.",
            _USES,
            "return part.source.key in self._aligned",
            "return True",
            "tests/laws/test_residency.py::test_resident_values_match_sent_values[threads]",
        ),
        Mutant(
            "any-slots",
            "A rank takes its own part only where the consumer's slots are the producer's.",
            _HANDLES,
            "isinstance(collect, Concat) and origin.slots == consumer.slots",
            "isinstance(collect, Concat) and len(origin.slots) == len(consumer.slots)",
            _on_processes("test_between_slots"),
        ),
        Mutant(
            "address-of-before",
            "A resident of a group that was restarted is got from its new workers.",
            f"{_WORKER}/residents/peers.py",
            "return source.group, source.slot(rank), source.generation",
            "return source.group, source.slot(rank), 0",
            _on_processes("test_pending_calls_fail_with_one_error"),
        ),
        Mutant(
            "written-and-used",
            "What somebody has written into in place nobody gets any more.",
            f"{_WORKER}/residents/store.py",
            '                entry.error = (\n                    f"resident',
            '                entry.lent[:0] = (\n                    f"resident',
            _on_processes("test_write_into_an_argument"),
        ),
        Mutant(
            "unweighted",
            "The mean of a resident's parts weighs them by their rows, as the collected value does.",
            _USES,
            "            ranks = attrs.evolve(ranks, rows=rows)\n",
            "",
            _on_threads("test_every_collect"),
        ),
        Mutant(
            "told-elsewhere",
            "A kept call's failure is raised by its own scope, and not by one that ends before.",
            _KEPT,
            "if record.freed_by and record not in elsewhere]",
            "if record.freed_by]",
            _on_threads("test_unused_poison"),
        ),
        Mutant(
            "nobody-borrows",
            "Closing is refused while another group uses a resident.",
            _KEPT,
            "if closing is None or not borrow.borrower.link.is_within(closing)",
            "if closing is None or borrow.borrower.link.is_within(closing)",
            _on_threads("test_broken_borrow"),
        ),
    ),
    "renewal": (
        Mutant(
            "sent-once",
            "New code of the script comes with its globals as they are now.",
            f"{_DEFINITIONS}/bundles.py",
            "return value is not MISSING and self.names.get(name, MISSING) is not value",
            "return value is not MISSING and name not in self.names",
            _on_processes("test_a_name_that_is_bound_anew"),
        ),
        Mutant(
            "reset-global",
            "What a role has set itself of the script's globals stays.",
            f"{_DEFINITIONS}/making.py",
            "if name not in before or here.get(name, MISSING) is before[name]:",
            "if name not in before or name in here:",
            "tests/identity/test_seen.py::test_no_global_is_reset",
        ),
        Mutant(
            "lost-and-known",
            "What couldn't be rebuilt in a worker is sent again when it is needed again.",
            f"{_DEFINITIONS}/bundles.py",
            "        self.sent_ids.difference_update(ids)\n",
            "",
            "tests/identity/test_travel.py::test_definition_that_cannot_be_made_there[processes]",
        ),
        Mutant(
            "one-table",
            "The workers of a restarted group are sent the script's definitions anew.",
            "core/colocate/_worker_group/workforce.py",
            'attrs.field(factory=lambda: Table("is given it"))',
            'attrs.field(default=Table("is given it"))',
            "tests/identity/test_travel.py::test_restart",
        ),
        Mutant(
            "stale-source",
            "A module that the driver has reloaded is what the next workers get.",
            f"{_DEFINITIONS}/sources.py",
            "if cached is not None and cached[0] is spec else",
            "if cached is not None else",
            "tests/identity/test_travel.py::test_a_module_that_is_edited",
        ),
        Mutant(
            "amid-a-step",
            "A step that all ranks have left in its middle leaves no model in the middle of it.",
            "core/colocate/features/process_groups/driver.py",
            "if not broken and not state.in_step:",
            "if not broken:",
            _on_processes("test_failed_steps_are_done_again[first-ddp]"),
        ),
        Mutant(
            "optimizer-of-the-former",
            "The optimizer of a model that was made anew goes on with the new parameters.",
            "core/colocate/features/process_groups/rebuilt.py",
            '[replaced.get(id(item), item) for item in group["params"]]',
            'list(group["params"])',
            _on_processes("test_a_model_made_anew[own mesh-meta-True]"),
        ),
        Mutant(
            "forgotten-tag",
            "`wait_ready` tells the tag of the checkpoint that a restarted group goes on from.",
            "core/colocate/features/checkpoints/driver.py",
            "self._restored_tag = None if checkpoint is None else checkpoint.tag",
            "self._restored_tag = self._restored_tag if checkpoint is None else None",
            _on_processes("test_roles_continue_from_last_checkpoint"),
        ),
        Mutant(
            "written-by-one",
            "What a `save` does after a second `yield` runs when all ranks have written.",
            "core/colocate/features/checkpoints/saving.py",
            "while any(report.has_more for report in self._ask_workers(dict.fromkeys(self._slots), folder)):",
            "if any(report.has_more for report in self._ask_workers(dict.fromkeys(self._slots), folder)):",
            _on_threads("test_other_halves[False]"),
        ),
    ),
    "sleep": (
        Mutant(
            "resident-asleep",
            "Memory that a resident has stays awake with it.",
            _SLEEP,
            '        users["residents"] = _collect_keys(lying.values())\n',
            "",
            _on_processes("test_sleep_spares_used_memory"),
        ),
        Mutant(
            "one-rank-awake",
            "A wake for which one rank has no room leaves the role asleep on all.",
            _SLEEP,
            "lambda: self.offload.undo_restore(coming.pieces)",
            "lambda: None",
            _on_processes("test_wake_without_room"),
        ),
        Mutant(
            "discards-what-others-hold",
            "What somebody else holds, too, keeps its contents where a role's are discarded.",
            _SLEEP,
            "needed = _collect_keys([*others, *(",
            "needed = _collect_keys([*(",
            _on_processes("test_discard_spares_used_contents"),
        ),
        Mutant(
            "awake-after-a-checkpoint",
            "What slept before a checkpoint sleeps again after it.",
            _TURNS,
            "                self._accounts.mark_changed(name)\n            self._restore_sleep(name, slept)\n",
            "                self._accounts.mark_changed(name)\n",
            _on_processes("test_checkpoint_of_a_sleeping_role"),
        ),
        Mutant(
            "wakes-all",
            "A method that needs only the weights has the rest of its role sleep on.",
            _TURNS,
            "tags = _ALL if spec.awake is None else spec.awake",
            "tags = _ALL",
            _on_processes("test_method_wakes_only_needed_memory"),
        ),
        Mutant(
            "next-one-goes",
            "Whose next turn is farthest makes room.",
            _TURNS,
            "key=lambda role: (-places.get(role, len(turns)), role)",
            "key=lambda role: (places.get(role, len(turns)), role)",
            _on_processes("test_farthest_or_least_recent_role_makes_room"),
        ),
        Mutant(
            "fails-and-wakes",
            'What was put to sleep with on_call="fail" no call wakes.',
            f"{_MEMORY}/marks.py",
            "for mark, slept in self.role_marks(role, tags).items() if not slept.until_woken}",
            "for mark, slept in self.role_marks(role, tags).items()}",
            _on_processes("test_a_call_that_fails_of_sleep"),
        ),
        Mutant(
            "in-use-for-ever",
            "A call that has failed uses its role no longer: that makes room for the next one.",
            f"{_WORKER}/runner.py",
            "            worker_context.after_call(call.seq)\n            worker_context.peers.collect_written",
            "            worker_context.peers.collect_written",
            _on_processes("test_a_role_that_can_not_take_turns"),
        ),
    ),
    "identity": (
        Mutant(
            "same-ids",
            "What two workers define is two things, though they come of one template.",
            f"{_DEFINITIONS}/ids.py",
            "os.register_at_fork(after_in_child=_after_fork)\n",
            "",
            _on_processes("test_class_of_the_script"),
        ),
        Mutant(
            "any-checkpoint",
            "A group comes back from its own checkpoint, and not from one that has taken its place.",
            "core/colocate/features/checkpoints/share.py",
            "return checkpoint_identity(_read_record(place)) == identity",
            'return checkpoint_identity(_read_record(place)) != ""',
            "tests/found/test_found.py::test_found[restore_mixed.py-processes]",
        ),
        Mutant(
            "bare-exception",
            "An exception of the script has its attributes on the driver.",
            f"{_DEFINITIONS}/pickler.py",
            "return making.make_exception, (kind, base, reduced[1]), *reduced[2:]",
            "return making.make_exception, (kind, base, reduced[1])",
            _on_processes("test_class_of_the_script"),
        ),
        Mutant(
            "not-in-main",
            "Plain pickle finds the script's classes in the worker's `__main__`.",
            f"{_DEFINITIONS}/bundles.py",
            "                bind(get_script_names(), script_things)\n",
            "",
            "tests/identity/test_seen.py::test_plain_pickle_in_a_role[pickle]",
        ),
        Mutant(
            "generic-twice",
            "A class that a generic one makes is one class, whoever has made it first.",
            f"{_DEFINITIONS}/pickler.py",
            'if not isinstance(of, dict) or not isinstance(of.get("origin"), type):',
            'if not isinstance(of, dict) or isinstance(of.get("origin"), type):',
            "tests/identity/test_seen.py::test_class_that_a_generic_one_makes[processes]",
        ),
        Mutant(
            "another-module",
            "A module that a worker has already, with other content than the driver's, keeps a group from starting.",
            f"{_DEFINITIONS}/sources.py",
            "        if name in sys.modules and (driver_file :=",
            "        if name not in sys.modules and (driver_file :=",
            "tests/identity/test_travel.py::test_other_content_under_one_name",
        ),
        Mutant(
            "never-given",
            "A worker that lacks a class, which it has got from another one, is given that by its driver.",
            "core/colocate/_worker_group/published.py",
            "            self._send_missing([worker.slot], [definition])\n",
            "            pass\n",
            "tests/identity/test_elsewhere.py::test_class_that_only_another_worker_knows[processes]",
        ),
        Mutant(
            "name-is-enough",
            "A class whose name another one has taken is the one that it was, and not that other one.",
            f"{_DEFINITIONS}/names.py",
            "return (name, path) if target is thing else None",
            "return (name, path) if target is not MISSING else None",
            "tests/identity/test_seen.py::test_class_with_reused_name_stays_same",
        ),
    ),
}

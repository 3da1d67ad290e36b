"""The chaos suite catches builds that are broken on purpose within a few programs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from tests.chaos import engine, judge, mutants
from tests.chaos.ledger import Ledger
from tests.chaos.programs import KINDS, SLOTS, Episode, program

BROKEN_S = 10  # the timeout of calls that no longer end
TORCH_S = 30  # to import torch on a busy machine
Wanted = Callable[[Episode], bool]


def amid(episode: Episode) -> bool:
    return episode.fault.moment not in ("spawn", "close")


def idle_then_closed(episode: Episode) -> bool:
    return episode.fault.moment in ("idle", "call") and episode.fault.ending == "close" and not episode.restart


def with_calls_pending(episode: Episode) -> bool:
    return episode.fault.moment in ("queue", "call") and not episode.restart


def with_a_failure(episode: Episode) -> bool:
    # A later call, or a restart's checkpoint, would wait: the worker holds, and the driver doesn't know of the failure.
    found = episode.settled and [step.what for step in episode.before] == ["fail"] and not episode.restart
    return found and amid(episode)


def with_a_collective_after_a_failed_one(episode: Episode) -> bool:
    waited_in = [
        (failed, then) for failed, then in itertools.pairwise(episode.before) if len(failed.ranks) < episode.groups[0]
    ]
    return (
        episode.settled
        and ("add_failing", "add") in [(failed.what, then.what) for failed, then in waited_in]
        and amid(episode)
    )


def with_a_step_that_ranks_wait_in(episode: Episode) -> bool:
    last = episode.before[-1] if episode.before else None
    return (
        last is not None
        and (last.what, last.where, last.count) == ("train_failing", "backward", 1)
        and len(last.ranks) == 1
        and amid(episode)
    )


def with_weights_of_two_steps(episode: Episode) -> bool:
    done = [step.what for step in episode.before]
    return done == ["tear"] and not episode.restart and amid(episode)


def with_roles_that_take_turns(episode: Episode) -> bool:
    return bool(episode.budget) and episode.settled and amid(episode)


def with_a_sync_that_fails(episode: Episode) -> bool:
    steps = [step for step in episode.before if step.what == "weights"]
    return any(step.ranks and step.giver is None for step in steps) and episode.settled and amid(episode)


def with_a_stream(episode: Episode) -> bool:
    return any(step.what == "rows" and step.where == "stream" for step in episode.before) and amid(episode)


def with_a_child(episode: Episode) -> bool:
    return any(step.what == "child" for step in episode.before) and episode.settled and amid(episode)


def with_a_pause(episode: Episode) -> bool:
    pauses = [step.where for step in (*episode.before, *episode.after) if step.what == "pause"]
    begun = any(step.what == "pause" for step in episode.before) and episode.fault.moment != "pause"
    return begun and not {"stream", "batch"} & {*pauses} and not episode.restart and amid(episode)


def with_rows_over_a_restart(episode: Episode) -> bool:
    fault = episode.fault
    return episode.restart and fault.moment == "rows" and fault.retry > 0 and fault.where == "stream"


def with_a_recording(episode: Episode) -> bool:
    calls = sum(step.count for step in episode.before if step.what == "submit" and step.role == "a")
    return episode.records and calls > 2 and episode.settled and amid(episode)


def with_a_replay(episode: Episode) -> bool:
    return with_a_recording(episode) and episode.replay is not None


def with_a_profile_that_fails(episode: Episode) -> bool:
    return episode.profile is not None and episode.profile.fails and episode.profile.again and amid(episode)


def with_stops(episode: Episode) -> bool:
    calls = sum(step.count for step in episode.before if step.what == "submit" and step.role == "a")
    return episode.stops and calls > 5 and episode.settled and amid(episode)


def anything(episode: Episode) -> bool:
    return True


def first_seed(kind: str, wanted: Wanted, torch: bool) -> int:
    """Return the seed of the first small program of a kind whose first episode is wanted."""
    for seed in itertools.count(KINDS.index(kind), len(KINDS)):
        made = program("local", seed, torch)
        if made.slots <= 2 and wanted(made.episodes[0]):
            return seed
    raise AssertionError("never reached")


def caught(mutant: str, seed: int, torch: bool, episodes: int | None = None) -> str:
    """Play a program with a mutant; return the first problem in words, or "nothing"."""
    with engine.running("local", SLOTS, SLOTS) as made:
        env = {mutants.VARIABLE: mutant, "COLOCATE_CHAOS_LONG_S": str(BROKEN_S + TORCH_S * torch)}
        lane = judge.Lane(made, Ledger(), env, first_only=True)
        try:
            lane.play(seed, torch, episodes)
            lane.rest()
        except judge.Enough as found:
            return str(found)
        finally:
            lane.drop()
    return "nothing"


CASES = [
    (mutants.skipped_kill, "stop", idle_then_closed, "close"),
    (mutants.unfreed_reservation, "kill", anything, "did not become free"),
    (mutants.swallowed_error, "kill", with_a_failure, "should have raised"),
    (mutants.unresolved_future, "kill", with_calls_pending, "ended with CallTimeout"),
    (mutants.stale_pairing, "kill", with_a_collective_after_a_failed_one, "ended with RoleError"),
    (mutants.unrenewed_model, "kill", with_a_step_that_ranks_wait_in, "ended with"),
    (mutants.uncounted_updates, "kill", with_weights_of_two_steps, "without a common state"),
    (mutants.lost_byte, "kill", with_roles_that_take_turns, "memory that isn't what it was"),
    (mutants.unkept_budget, "kill", with_roles_that_take_turns, "bytes may be"),
    (mutants.half_synced, "kill", with_a_sync_that_fails, "has weights, of version"),
    (mutants.doubled_rows, "kill", with_a_stream, "rows these have come"),
    (mutants.unmissed_child, "kill", with_a_child, "has lost its child"),
    (mutants.unpaused_role, "kill", with_a_pause, "has run while its role was paused"),
    (mutants.lost_rows, "kill", with_rows_over_a_restart, "rows only these have come"),
    (mutants.unrecorded_calls, "kill", with_a_recording, "recording: call"),
    (mutants.unanswered_calls, "kill", with_a_replay, "replay: call"),
    (mutants.kept_profiles, "kill", with_a_profile_that_fails, "profile: profile is left"),
    (mutants.kept_stops, "kill", with_stops, "isn't done after"),
]


@pytest.mark.long
@pytest.mark.parametrize(("mutant", "kind", "wanted", "words"), CASES, ids=[case[0].__name__ for case in CASES])
def test_caught(mutant: Callable[[], None], kind: str, wanted: Wanted, words: str) -> None:
    """The suite catches each mutant with the expected complaint, and finds nothing without the mutant."""
    torch = mutant in (mutants.stale_pairing, mutants.unrenewed_model, mutants.uncounted_updates)
    seed = first_seed(kind, wanted, torch)
    assert words in caught(mutant.__name__, seed, torch)
    assert caught("", seed, torch, episodes=1) == "nothing"  # the mutant was the cause

"""A slice of the chaos suite: a few programs on each executor survive their faults. `make chaos` plays thousands."""

from __future__ import annotations

import os

import pytest
from tests.chaos import deaths, engine, judge
from tests.chaos.ledger import Ledger
from tests.chaos.programs import SLOTS, kind_of

import colocate

TRAINING = 8045
DRIVERS = {"local": (4,), "ray": (9,), "dask": (4,)}
PLAYED = 5  # tries at most: on a busy machine a fault's moment may come when its target is gone
NEEDS = {"ray": "ray", "dask": "distributed"}


@pytest.mark.in_make_test("local")
@pytest.mark.parametrize(
    ("executor", "seeds"),
    [("local", (0, 1, 2, 3)), ("local", (TRAINING,)), ("ray", (0, 3)), ("dask", (1, 3))],
    ids=["local", "training", "ray", "dask"],
)
def test_slice(executor: str, seeds: tuple[int, ...]) -> None:
    """A program survives its fault: nothing hangs, nothing is left, no result is wrong."""
    if executor in NEEDS:
        pytest.importorskip(NEEDS[executor])
    ledger = Ledger()
    with engine.running(executor, SLOTS, SLOTS) as made:
        if made.slots is not None:
            with colocate.connect(executor, **made.options) as runtime, runtime.reserve(2):
                assert made.held_by(os.getpid()) != []  # leftovers of a killed driver would be seen
            assert made.held_by(os.getpid()) == []
        lane = judge.Lane(made, ledger)
        for seed in seeds:
            tally = ledger.tally(executor, kind_of(seed))
            before = tally.tried
            for _ in range(PLAYED):
                lane.play(seed, seed == TRAINING, episodes=1)
                if tally.tried > before:
                    break
        lane.rest()
        lane.close()
        deaths.burst(made, ledger, DRIVERS[executor])
    assert ledger.problems == []
    kinds = {kind_of(seed) for seed in (*seeds, *DRIVERS[executor])}
    for kind in kinds:
        tally = ledger.tally(executor, kind)
        assert tally.tried == tally.survived > 0

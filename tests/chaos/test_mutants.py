"""Builds that are broken on purpose are caught within a few programs: so the suite would see such a bug."""

from __future__ import annotations

import pytest
from tests.chaos import engine, judge
from tests.chaos.ledger import Ledger
from tests.chaos.mutants import MUTANTS, VARIABLE
from tests.chaos.programs import SLOTS


def caught(mutant: str, seeds: tuple[int, ...], torch: bool) -> str:
    """Play until something is wrong; in words what."""
    with engine.running("local", SLOTS, SLOTS) as made:
        lane = judge.Lane(made, Ledger(), lambda words: None, {VARIABLE: mutant}, first_only=True)
        try:
            for seed in seeds:
                lane.play(seed, torch)
        except judge.Enough as found:
            return str(found)
        finally:
            lane.drop()
    return "nothing"


@pytest.mark.parametrize(
    ("mutant", "seeds", "torch", "words"),
    [
        ("skipped_kill", (1,), False, "close"),
        ("unfreed_reservation", (10,), False, "PlacementTimeout"),
        ("swallowed_error", (13,), False, "should have raised"),
        ("unresolved_future", (20,), False, "ended with CallTimeout"),
        ("stale_pairing", (950,), True, "ended with RoleError"),
    ],
)
def test_caught(mutant: str, seeds: tuple[int, ...], torch: bool, words: str) -> None:
    """It is, and for what is wrong with it."""
    assert words in caught(mutant, seeds, torch)


def test_all_are_tried() -> None:
    """Every mutant there is has its seeds above."""
    (mark,) = test_caught.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == set(MUTANTS)

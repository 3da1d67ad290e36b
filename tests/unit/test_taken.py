"""What a call tells that it was given: of N ranks each may get a part of each."""

from __future__ import annotations

from colocate._protocol.taken import MANY, summed


def test_some_are_told_one_by_one() -> None:
    taken = [(7, rank, 10, 1.0 + rank, 2.0 + rank, rank, "" if rank < 9 else f"no {rank}") for rank in range(8)]
    assert summed(taken) == taken
    assert summed([]) == []


def test_many_are_told_as_one() -> None:
    """Each resident by itself, and beside what lay here already; nothing is lost of the bytes."""
    many = [(7, rank, 10, 1.0 + rank, 2.0 + rank, rank, "" if rank < 9 else f"no {rank}") for rank in range(1, 64)]
    few = [(9, 3, 1, 5.0, 6.0, 0, "")]
    here = [(7, 0, 10, 0.0, 0.0, 0, "")]
    assert sorted(summed([*here, *many, *few])) == sorted(
        [*here, (7, MANY, 630, 2.0, 65.0, sum(range(64)), "no 9"), *few]
    )


def test_many_that_lay_here() -> None:
    """They are told as they are: nothing of them was on its way."""
    here = [(7, 0, 10, 0.0, 0.0, 0, "")] * 20
    assert summed(here) == here
    came = (7, 1, 10, 1.0, 2.0, 0, "")
    assert sorted(summed([*here, came])) == sorted([*here, came])

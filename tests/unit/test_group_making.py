"""A process group is made by all ranks or none, also when ranks withdraw while it is made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from colocate.features.process_groups import torch_groups
from colocate.features.process_groups.meetings import report_failure, wait_all_made, wait_all_ready, withdraw_rank
from colocate.testing import leaks
from colocate.testing.waiting import PATIENCE_S

RANKS = 3


@pytest.fixture
def ranks() -> Iterator[list[Any]]:
    """Yield two clients of a store for each rank."""
    pytest.importorskip("torch")
    with leaks.share_between_tests():  # torch keeps a pipe open for good.
        store, address = torch_groups.serve_store("127.0.0.1")
    made = [[torch_groups.connect_store(address, 60.0) for _ in range(2)] for _ in range(RANKS)]
    yield made
    made.clear()
    del store


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * RANKS) as pool:
        yield pool


@pytest.mark.parametrize("late", [False, True])
def test_one_could_not(ranks: list[Any], pool: ThreadPoolExecutor, late: bool) -> None:
    """If one rank can't make a group, none has it: no connected rank, no rank that withdraws, and no late one."""
    waiting = [pool.submit(wait_all_ready, store, "one", rank, RANKS) for rank, (store, _) in enumerate(ranks)]
    assert [each.result(PATIENCE_S) for each in waiting] == [True] * RANKS
    leaving = pool.submit(withdraw_rank, ranks[1][1], "one")
    patience = 0.1 if late else 60.0
    waiting = [pool.submit(wait_all_made, ranks[rank][0], "one", rank, RANKS, patience) for rank in range(1, RANKS)]
    if not late:
        report_failure(ranks[0][0], "one")
    assert [each.result(PATIENCE_S) for each in (*waiting, leaving)] == [False] * RANKS
    assert not wait_all_made(ranks[0][0], "one", 0, RANKS, 60.0)
    assert not any(wait_all_ready(store, "one", rank, RANKS) for rank, (store, _) in enumerate(ranks))  # a second try


def test_ranks_agree_on_group_making(ranks: list[Any], pool: ThreadPoolExecutor) -> None:
    """All ranks agree on whether a group is made, in whatever order they come and withdraw."""
    seen = set()
    for number in range(200):
        rendezvous_key = f"rendezvous_key {number}"
        turns = [(rank, False) for rank in range(RANKS)]
        turns += [(rank, True) for rank in random.Random(number).sample(range(RANKS), number % RANKS)]
        random.Random(number).shuffle(turns)
        leaving = [pool.submit(withdraw_rank, ranks[rank][1], rendezvous_key) for rank, leaves in turns[:1] if leaves]
        come = [
            pool.submit(wait_all_ready, ranks[rank][0], rendezvous_key, rank, RANKS)
            for rank, leaves in turns
            if not leaves
        ]
        leaving += [pool.submit(withdraw_rank, ranks[rank][1], rendezvous_key) for rank, leaves in turns[1:] if leaves]
        (made,) = {each.result(PATIENCE_S) for each in come}
        if made:
            have = [
                pool.submit(wait_all_made, ranks[rank][0], rendezvous_key, rank, RANKS, 60.0) for rank in range(RANKS)
            ]
            assert all(each.result(PATIENCE_S) for each in have)
        assert all(each.result(PATIENCE_S) == made for each in leaving)
        seen.add(made)
    assert seen == {True, False}

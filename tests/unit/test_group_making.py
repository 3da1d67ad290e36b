"""Process groups that are being made: by all ranks or none, and what a rank that is called back leaves behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from colocate._protocol.consequence import Consequence
from colocate.features.process_groups import making as group_making, torch_groups
from colocate.features.process_groups.making import Making, Together
from colocate.features.process_groups.meetings import all_have, all_make, can_not, withdraw
from colocate.testing import leaks
from colocate.testing.waiting import PATIENCE_S, becomes_true, wait_until

RANKS = 3
SEQ = 3


@pytest.fixture
def ranks() -> Iterator[list[Any]]:
    """Clients of a store: two for each rank."""
    pytest.importorskip("torch")
    with leaks.shared():  # a pipe of torch's own, for good
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
    """Then nobody has it: those that have connected are told, who has left, and the one that comes too late."""
    waiting = [pool.submit(all_make, store, "one", rank, RANKS) for rank, (store, _) in enumerate(ranks)]
    assert [each.result(PATIENCE_S) for each in waiting] == [True] * RANKS
    leaving = pool.submit(withdraw, ranks[1][1], "one")
    patience = 0.1 if late else 60.0
    waiting = [pool.submit(all_have, ranks[rank][0], "one", rank, RANKS, patience) for rank in range(1, RANKS)]
    if not late:
        can_not(ranks[0][0], "one")
    assert [each.result(PATIENCE_S) for each in (*waiting, leaving)] == [False] * RANKS
    assert not all_have(ranks[0][0], "one", 0, RANKS, 60.0)
    assert not any(all_make(store, "one", rank, RANKS) for rank, (store, _) in enumerate(ranks))  # who asks again


def test_it_is_the_same_for_all(ranks: list[Any], pool: ThreadPoolExecutor) -> None:
    """Whoever comes, and withdraws, when."""
    seen = set()
    for number in range(200):
        rendezvous_key = f"rendezvous_key {number}"
        turns = [(rank, False) for rank in range(RANKS)]
        turns += [(rank, True) for rank in random.Random(number).sample(range(RANKS), number % RANKS)]
        random.Random(number).shuffle(turns)
        leaving = [pool.submit(withdraw, ranks[rank][1], rendezvous_key) for rank, leaves in turns[:1] if leaves]
        come = [
            pool.submit(all_make, ranks[rank][0], rendezvous_key, rank, RANKS) for rank, leaves in turns if not leaves
        ]
        leaving += [pool.submit(withdraw, ranks[rank][1], rendezvous_key) for rank, leaves in turns[1:] if leaves]
        (made,) = {each.result(PATIENCE_S) for each in come}
        if made:
            have = [pool.submit(all_have, ranks[rank][0], rendezvous_key, rank, RANKS, 60.0) for rank in range(RANKS)]
            assert all(each.result(PATIENCE_S) for each in have)
        assert all(each.result(PATIENCE_S) == made for each in leaving)
        seen.add(made)
    assert seen == {True, False}


@pytest.mark.parametrize("ends", [False, True], ids=["all are there", "a peer is gone, and the worker ends"])
def test_back_when_it_is_made(ends: bool, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor) -> None:
    """A rank that all have waited for makes the group with them, though it is called back; until then it isn't back."""
    monkeypatch.setattr(torch_groups, "connect_store", lambda *_: "store")
    monkeypatch.setattr(group_making, "all_make", lambda *_: True)
    monkeypatch.setattr(group_making, "withdraw", lambda *_: True)
    worker: Any = SimpleNamespace(asking=lambda: SEQ, why_not=lambda: None)
    making, begun, end = Making(worker), threading.Event(), threading.Event()
    made = []

    def make(store: object) -> None:
        begun.set()
        end.wait(PATIENCE_S)
        made.append(making.unfinished())

    plan: Any = SimpleNamespace(
        name="policy/actor/*", rendezvous_key="rendezvous_key", index=0, slots=(0, 1), timeout_s=60.0, make=make
    )
    lane = pool.submit(making.have, Together("actor/*", plan, ("127.0.0.1", 1), {}))
    assert begun.wait(PATIENCE_S)
    making.end_waits(lambda seq: seq >= SEQ, "a call has failed")
    assert isinstance(lane.exception(PATIENCE_S), Consequence)
    comes_back = pool.submit(making.back)
    assert not becomes_true(comes_back.done, 0.1)
    making.give_up() if ends else end.set()
    comes_back.result(PATIENCE_S)
    end.set()
    wait_until(lambda: made == [{"policy/actor/*"}] and not making.unfinished(), "it is made")

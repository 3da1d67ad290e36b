"""Closing while another thread closes the same: what was begun may come to nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import colocate
from colocate import ColocatedGroup, Pool, _detached
from colocate._owned.owned import Owned
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S


@pytest.fixture
def group() -> Iterator[ColocatedGroup]:
    with colocate.connect("local") as runtime, runtime.reserve(1) as pool:
        yield pool.spawn({"echo": colocate.role(Echo)})


def closing(node: Pool | ColocatedGroup, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """A thread that closes a node which is being detached, and so waits for that."""
    wait, waits = node._node.life.wait_closed, threading.Event()

    def noted() -> bool:
        waits.set()
        return wait()

    monkeypatch.setattr(node._node.life, "wait_closed", noted)
    thread = threading.Thread(target=node.close, daemon=True)
    thread.start()
    assert waits.wait(PATIENCE_S)
    return thread


@pytest.mark.parametrize("kind", ["pool", "group"])
def test_a_detach_that_fails(kind: str, group: ColocatedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close that has waited for it goes on to close the node."""
    node = group.owner if kind == "pool" else group
    assert node._node.life.close("a detach")
    thread = closing(node, monkeypatch)
    node._node.life.reopen()
    thread.join(PATIENCE_S)
    assert node.state == "closed"
    assert "close() at" in (node._node.closed_by or "")


def test_a_detach_that_does_not_fail() -> None:
    """Whoever has waited for it has nothing left to do."""
    node = Owned("group", "one", None)
    assert node.life.close("a detach")
    with ThreadPoolExecutor(1) as threads:
        left_to_do = threads.submit(node.take_closing, "a close")
        node.life.end()
        assert not left_to_do.result(PATIENCE_S)
    assert node.closed_by == "a detach"


def test_it_was_open_again_before_anybody_waited() -> None:
    """Nobody waits for what has come to nothing already."""
    node = Owned("group", "one", None)
    assert node.life.close("a detach")
    node.life.reopen()
    assert not node.life.wait_closed()
    assert node.take_closing("a close")
    assert node.closed_by == "a close"


def test_detaching_while_slots_are_reserved_again() -> None:
    """It is refused with the reason, also when nobody reserves them any more; the pool is as it was."""
    with colocate.connect() as runtime, runtime.reserve(1) as pool:
        worker_group, slots = pool.spawn({"echo": colocate.role(Echo)})._node, pool._node
        reservation, slots.reservation = slots.reservation, None  # as `_reserve_again` does
        for worker_group.life.recovers, words in (
            (True, r"wait_ready\(\)"),
            (False, "was given up: close it, and"),
        ):
            with pytest.raises(colocate.ColocateError, match=rf"can't be detached: it has lost slots .*{words}"):
                _detached._close_all(slots, "a test")
            with pytest.raises(colocate.ColocateError, match=rf"pool 'pool-1' has lost slots .*{words}"):
                pool.spawn({"echo": colocate.role(Echo)})
        assert slots.closed_by is None
        slots.reservation = reservation

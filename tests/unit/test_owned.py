"""Closes that race with a detach, and a detach of a pool that has lost slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import colocate
from colocate import ColocatedGroup
from colocate._api import detached
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S


@pytest.fixture
def group() -> Iterator[ColocatedGroup]:
    with colocate.connect("local") as runtime, runtime.reserve(1) as pool:
        yield pool.spawn({"echo": colocate.role(Echo)})


@pytest.mark.parametrize("kind", ["pool", "group"])
def test_a_detach_that_fails(kind: str, group: ColocatedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close that waits for another thread's detach closes the object when the detach fails."""
    node = group.owner if kind == "pool" else group
    wait, waits = node._node.life.wait_closed, threading.Event()

    def noted() -> bool:
        waits.set()
        return wait()

    assert node._node.life.mark_closing("a detach")
    monkeypatch.setattr(node._node.life, "wait_closed", noted)
    thread = threading.Thread(target=node.close, daemon=True)
    thread.start()
    assert waits.wait(PATIENCE_S)
    node._node.life.reopen()
    thread.join(PATIENCE_S)
    assert node.state == "closed"
    assert "close() at" in (node._node.closed_by or "")


def test_detaching_while_slots_are_reserved_again() -> None:
    """A pool that has lost slots refuses a detach and a spawn with the reason, and stays open."""
    with colocate.connect() as runtime, runtime.reserve(1) as pool:
        worker_group, slots = pool.spawn({"echo": colocate.role(Echo)})._node, pool._node
        reservation, slots.reservation = slots.reservation, None  # as `_reserve_again` does
        for worker_group.life.recovers, words in (
            (True, r"wait_ready\(\)"),
            (False, "no restart of a group reserves slots again: close the pool, and"),
        ):
            with pytest.raises(colocate.ColocateError, match=rf"can't be detached: it has lost slots .*{words}"):
                detached._close_all(slots, "a test")
            with pytest.raises(colocate.ColocateError, match=rf"pool 'pool-1' has lost slots .*{words}"):
                pool.spawn({"echo": colocate.role(Echo)})
        assert slots.closed_by is None
        slots.reservation = reservation

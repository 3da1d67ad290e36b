"""Every rule of epochs, by which drivers command the keeper of a detachable pool, against a real keeper."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import attrs
import pytest

from colocate import wire
from colocate._protocol.commands import Detach
from colocate._system.deadline import Deadline
from colocate.errors import ClusterError
from colocate.keeper import (
    AdoptedSlot,
    Adoption,
    Keeper,
    Keepers,
    KeptSlot,
    Lease,
    Patience,
    PoolKeepers,
    Registration,
    adopt_lead,
    list_pools,
)
from colocate.testing.waiting import PATIENCE_S, wait_until

LEASE = Lease("name", 300.0, record=b"the record")


@attrs.define(eq=False)
class Side:
    """A keeper without workers, and the driver that created it."""

    keeper: Keeper
    keepers: Keepers
    key: bytes
    owner: KeptSlot
    ended: threading.Event

    @property
    def registration(self) -> Registration:
        return Registration("name", self.keeper.address, self.key)

    def adoption(self, who: str, own: bool = False, epoch: int = 0) -> AdoptedSlot:
        """Attach, as the driver of that name."""
        return adopt_lead(self.keepers, self.registration, Adoption(who, own, lambda by: None, epoch))


@pytest.fixture
def side() -> Iterator[Side]:
    key, ended = wire.new_key(), threading.Event()
    keeper = Keeper(key, detachable=True, on_end=ended.set)
    keepers = Keepers("test")
    owner = keepers.open_slot(keeper.address, key=key)
    assert owner.wait_connected() is None
    yield Side(keeper, keepers, key, owner, ended)
    keepers.close()
    keeper.close()


def test_not_detached(side: Side) -> None:
    """Until a pool is detached no other driver attaches, and the keeper ends with its driver."""
    with pytest.raises(ClusterError, match="hasn't been detached"):
        side.adoption("second", own=True)
    assert list_pools(side.keepers, [side.registration]) == []
    side.owner.close()
    assert side.ended.wait(PATIENCE_S)


def test_a_stranger_is_turned_away(side: Side) -> None:
    """A driver without the pool's key is refused, even with the key of the driver's other keepers."""
    assert side.owner.confirm(partial(Detach, lease=LEASE), within_s=PATIENCE_S)
    with pytest.raises(ClusterError):
        adopt_lead(
            side.keepers, attrs.evolve(side.registration, key=side.keepers.key), Adoption("x", True, lambda by: None)
        )


def test_detached_keepers_are_listed(side: Side) -> None:
    """A keeper that answers is listed as such, a silent one as registered, and an absent one not at all."""
    side.keepers.patience = Patience(dial_s=0.2)
    lease = attrs.evolve(LEASE, about={"slots": 1})
    assert side.owner.confirm(partial(Detach, lease=lease), within_s=PATIENCE_S)
    with closing(wire.listen()) as silent:
        there = {"one": side.keeper.address, "two": silent.address, "three": "unix:@nobody"}
        found = list_pools(
            side.keepers, [Registration(name, at, side.key, about=lease.about) for name, at in there.items()]
        )
    assert [(each["name"], each["answers"], each["slots"]) for each in found] == [("name", True, 1), ("two", False, 1)]


def test_fenced_driver_retains_no_keepers(side: Side) -> None:
    """A fenced driver can't retain the pool's other keepers, so the next owner can take them."""
    ended = threading.Event()
    other = Keeper(side.key, detachable=True, on_end=ended.set)
    kept = side.keepers.open_slot(other.address, key=side.key)
    assert kept.wait_connected() is None
    first = PoolKeepers(side.key, side.owner, [side.owner, kept])
    first.detach(LEASE)
    second = side.adoption("second", own=True)
    wait_until(lambda: side.owner.is_lost, "the first one's connection to the lead has ended")
    assert not first.retain()
    assert side.adoption("third", own=True).epoch == second.epoch + 1
    taken = attrs.evolve(side.registration, lead=other.address)
    adopted = adopt_lead(side.keepers, taken, Adoption("third", True, lambda by: None, second.epoch + 1))
    assert adopted.epoch == second.epoch + 1
    assert not ended.is_set()
    other.close()


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_adoption_that_is_given_up(side: Side, monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    """An owner that closes or is interrupted before it receives the grant leaves the pool to the next driver."""
    assert side.owner.confirm(partial(Detach, lease=LEASE), within_s=PATIENCE_S)
    side.owner.begin_release()
    side.owner.finish_release(Deadline(PATIENCE_S))
    slot = AdoptedSlot(side.keepers, side.keeper.address, side.key, Adoption("second", True, lambda by: None))
    answered = slot._request.result

    def interrupt(deadline: float) -> list[None]:
        answered(deadline)
        raise KeyboardInterrupt

    if interrupted:
        monkeypatch.setattr(slot._request, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            slot.adopt()
    else:
        slot.close()
        slot.adopt()
    assert slot.epoch == 2
    assert slot._gone_event.wait(PATIENCE_S)
    assert side.adoption("third").epoch == 3
    assert not side.ended.is_set()


def test_lower_epochs_are_refused(side: Side) -> None:
    """A keeper that isn't the lead needs the lead's epoch, and refuses one that isn't higher than its own."""
    assert side.owner.confirm(partial(Detach, lease=attrs.evolve(LEASE, record=b"")), within_s=PATIENCE_S)
    side.owner.begin_release()
    side.owner.finish_release(Deadline(PATIENCE_S))
    with pytest.raises(ClusterError, match="its lead keeper isn't here"):
        side.adoption("first")
    assert side.adoption("third", epoch=4).epoch == 4
    for late in (1, 3, 4):
        with pytest.raises(ClusterError, match=r"third has it \(epoch 4\)"):
            side.adoption("late", own=True, epoch=late)
    assert side.adoption("fourth", epoch=5).epoch == 5

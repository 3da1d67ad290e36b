"""A reservation that is withdrawn while it is made, as by Ctrl-C, leaves nothing in Ray; other versions are refused."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

import colocate
from colocate.errors import ColocateError
from colocate.executor import Request
from colocate.keeper import Failure
from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate_ray import placing
from colocate_ray.holder import Holder
from colocate_ray.owner import Owner
from colocate_ray.placing import Placing
from colocate_ray.terms import Cluster

REQUEST = Request(1)


class FakeRay:
    """Placement groups, by id."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.groups: set[int] = set()
        self.in_the_making: Any = lambda: None
        patch.setattr(placing, "placement_group", self._make)
        patch.setattr(placing, "remove_placement_group", lambda group: self.groups.discard(group.number))
        patch.setattr(placing, "placement_group_table", lambda group: {"state": "PENDING"})

    def _make(self, bundles: Any, strategy: str, name: str) -> Any:
        self.groups.add(len(self.groups))
        self.in_the_making()
        return SimpleNamespace(number=len(self.groups) - 1, id=SimpleNamespace(hex=lambda: ""))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


@pytest.fixture
def made(ray: FakeRay) -> Placing:
    made = Placing(Cluster(), lambda *lost: None)
    nodes: Any = SimpleNamespace(
        check_possible=lambda request: None, fits_now=lambda request: True, holding=lambda group: set()
    )
    made.nodes = nodes
    return made


def test_before_it_is_noted(ray: FakeRay, made: Placing) -> None:
    """The envoy hears of the withdrawal before it has begun with the reservation."""
    made.release(1)
    with pytest.raises(ColocateError, match="withdrawn"):
        made.reserve(1, REQUEST, b"")
    assert ray.groups == set()


def test_while_the_group_is_being_made(ray: FakeRay, made: Placing) -> None:
    """The one that Ray then comes back with is given back."""
    releasing = threading.Thread(target=made.release, args=(1,))

    def withdraw() -> None:
        releasing.start()
        wait_until(lambda: 1 in made._withdrawn, "it is withdrawn")

    ray.in_the_making = withdraw
    with pytest.raises(ColocateError, match="withdrawn"):
        made.reserve(1, REQUEST, b"")
    releasing.join(PATIENCE_S)
    assert ray.groups == set()


def test_another_version() -> None:
    """What is in Ray refuses a driver of another one, with both and what to do."""
    words = f"has colocate {colocate.__version__}, the driver 0.0: install the same in both: pip install ."
    assert str(Holder().open("0.0", 1, b"", REQUEST, {}, Cluster())).startswith(f"it {words}")
    refused = Owner().open("0.0", b"", "name", Cluster(), None)
    assert isinstance(refused, Failure)
    assert words in str(refused.error())

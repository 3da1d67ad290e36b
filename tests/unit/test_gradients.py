"""What is known of gradients beside the lane."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colocate.worker.memory.gradients import Gradients


def trained(size: int) -> torch.Tensor:
    """A tensor with a gradient."""
    tensor = torch.ones(size, requires_grad=True)
    tensor.sum().backward()
    return tensor


class Lane:
    """Does at once what it is asked, or when it is done with a call."""

    def __init__(self) -> None:
        self.busy = False
        self.waiting: list[Callable[[], object]] = []

    def do(self, action: Callable[[], object]) -> None:
        """As a lane does."""
        if self.busy:
            self.waiting.append(action)
        else:
            action()

    def ends(self) -> None:
        """The call does."""
        self.busy = False
        while self.waiting:
            self.waiting.pop()()


@pytest.fixture
def site() -> Any:
    """A worker with one role."""
    instance = SimpleNamespace(weights=trained(1))
    return SimpleNamespace(lane=Lane(), roles={"role": SimpleNamespace(name="role", instance=instance)})


def sizes(known: Any) -> list[int]:
    """Of the role's."""
    return [*known["role"].get("cpu", {}).values()]


def test_of_just_now(site: Any) -> None:
    """Those of the tensors that somebody has found; nothing is looked for."""
    gradients = Gradients(site)
    assert sizes(gradients.of({"role": [trained(3), torch.ones(2)]})) == [12]
    assert not gradients.is_due
    site.roles.clear()
    assert sizes(gradients.of({"role": [trained(5)]})) == [20]


def test_while_a_call_takes_long(site: Any) -> None:
    """They are those of before; what was found isn't kept for it, so that the call may let go of it."""
    gradients = Gradients(site)
    gradients.of({"role": [trained(3)]})
    site.lane.busy = True
    found = [trained(4)]
    gone = weakref.ref(found[0])
    assert sizes(gradients.of({"role": found})) == [12]
    assert gradients.is_due
    found.clear()
    assert gone() is None
    site.lane.ends()
    site.lane.busy = True
    assert sizes(gradients.of({"role": [trained(6)]})) == [4]  # of what the role had when the call had ended


def test_memory_that_moves(site: Any) -> None:
    """Whoever has looked sees where they are then; nothing is looked for if nobody has."""
    gradients = Gradients(site)
    gradients.moved("role")
    gradients.of({"role": [trained(3)], "other": [trained(2)]})
    site.lane.busy = True
    gradients.moved("role")
    gradients.moved("unknown")
    known = gradients.of({})
    assert sizes(known) == [4]
    assert [*known["other"]["cpu"].values()] == [8]
    assert len(known) == 2


def test_code_that_raises(site: Any) -> None:
    """A tensor of a kind of its own: the lane goes on, and others are known."""

    class Odd(torch.Tensor):
        @property
        def is_leaf(self) -> bool:  # type: ignore[override]
            raise ValueError("odd")

    found = Gradients(site).of({"odd": [torch.ones(1).as_subclass(Odd)], "role": [trained(3)]})
    assert sizes(found) == [12]
    assert "odd" not in found


def test_two_who_ask(site: Any) -> None:
    """The lane looks once."""
    gradients = Gradients(site)
    site.lane.busy = True
    asking = [threading.Thread(target=gradients.of, args=({"role": [trained(2)]},)) for _ in range(2)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(site.lane.waiting) == 1

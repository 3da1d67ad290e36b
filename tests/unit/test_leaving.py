"""What is found in a value that a role has returned: the tensors and arrays of which bytes and writes are noted."""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from typing import Any

import attrs
import pytest

from colocate._values.leaving import Watch, memories

torch = pytest.importorskip("torch")


@dataclasses.dataclass
class Batch:
    x: Any
    more: Any = None


@attrs.define(slots=True)
class Rollout:
    x: Any
    more: Any = attrs.field(default=None, init=False)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: [{"x": (x,)}],
        Batch,
        lambda x: UserDict(x=x),
        lambda x: [Rollout(x)],
        lambda x: Batch((1, 2), ((1, "a"), (x, 3))),
        lambda x: Batch((1, 2), ((1, (2, (x,))),)),
        lambda x: Batch(0, (1, Batch(x))),
    ],
)
def test_a_write(make: Any, strict: bool) -> None:
    """It is noticed wherever in the value it is, and the bytes count; strictly one behind torch as well."""
    x = torch.ones(10)
    watch = Watch(make(x), strict)
    assert watch.nbytes == 40
    assert not watch.written()
    x.add_(1)
    assert watch.written()
    assert not watch.written()
    x.numpy()[0] = 7
    assert watch.written() == strict


@pytest.mark.parametrize(
    ("value", "write"),
    [
        (Batch([1]), lambda batch: batch.x.append(2)),
        ([Rollout(1)], lambda rollouts: setattr(rollouts[0], "x", 2)),
        ({"seen": {1}}, lambda values: values["seen"].add(2)),
        (deque([1]), lambda values: values.append(2)),
    ],
)
def test_a_write_into_what_has_no_tensor(value: Any, write: Any) -> None:
    watch = Watch(value, True)
    assert not watch.written()
    write(value)
    assert watch.written()


def test_what_leads_to_itself() -> None:
    """It is looked at once; a field that isn't set is nothing."""
    one = Batch(torch.ones(1))
    one.more = [one, Rollout(torch.ones(2))]
    assert [each.numel() for each in memories(one)] == [1, 2]
    assert not Watch(one, True).written()
    del one.more
    assert [each.numel() for each in memories([one, one])] == [1]

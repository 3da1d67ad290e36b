"""What a role's `save` takes: copies on the host, and what is noticed where it takes none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from colocate import Role
from colocate.features.checkpoints.read_later import ReadLater, variables
from colocate.torch import host_copy, save_state


def test_a_copy_has_nothing_of_the_state() -> None:
    """Structure, types, ties, shapes and strides are the same, and the memory isn't."""
    net = torch.nn.Linear(3, 2)
    tied, turned = net.weight, torch.arange(6.0).reshape(2, 3).t()
    state = {
        "net": net.state_dict(),
        "again": [tied, (turned, np.arange(3), {1, 2})],
        "empty": torch.zeros(0),
        "half": tied[:1],
        "few": torch.eye(2).to_sparse(),
        "lr": 0.1,
    }
    copied = host_copy(state)
    assert type(copied["net"]) is OrderedDict
    assert copied["net"]._metadata == state["net"]._metadata  # type: ignore[attr-defined]
    again: Any = copied["again"]
    assert again[0] is copied["net"]["weight"]
    assert not again[0].requires_grad
    assert (type(again[1]), again[1][0].stride(), again[1][2]) == (tuple, (1, 3), {1, 2})
    before = host_copy(copied)
    with torch.no_grad():
        net.weight += 1
        turned += 1
    state["again"][1][1][0] = 7  # type: ignore[index]
    for now, then in zip(leaves(copied), leaves(before), strict=True):
        assert np.array_equal(now, then)
    assert not np.array_equal(again[0], tied.detach())


def test_views_of_one_memory() -> None:
    """Each view has its own values in the copy, though torch computes some of these as they are read."""
    whole = torch.polar(torch.ones(4), torch.arange(4.0))
    state = {
        "whole": whole,
        "conjugate": whole.conj(),
        "negative": whole.conj().imag,
        "imaginary": whole.imag,
        "expanded": whole[1:2].expand(4),
        "conjugates expanded": whole[1:2].conj().expand(4),
        "windows": whole.unfold(0, 2, 1),
        "conjugate windows": whole.conj().unfold(0, 2, 1),
        "zeros": torch._efficientzerotensor(4),
        "bits": torch.view_as_real(whole).view(torch.int32),
    }
    copied = host_copy({**state, "again": whole, "conjugate again": whole.conj()})
    values = {name: each.resolve_conj().resolve_neg().clone() for name, each in state.items()}
    whole.zero_()
    for name, value in values.items():
        assert torch.equal(copied[name].resolve_conj().resolve_neg(), value), name
    assert copied["again"] is copied["whole"]
    assert copied["conjugate again"] is copied["conjugate"]


def leaves(value: Any) -> list[Any]:
    """The tensors and arrays in a value, as arrays."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, torch.Tensor):
        return [value.to_dense().detach().numpy()]
    return [value] if isinstance(value, np.ndarray) else []


def test_a_state_is_written_at_once_outside_of_a_checkpoint(tmp_path: Path) -> None:
    """By a role that is called as any object is."""
    from torch.distributed.checkpoint.state_dict_loader import load

    class Learner(Role):
        def save(self, directory: str) -> None:
            save_state({"weight": torch.ones(3)}, directory, self.ctx)

    Learner().save(str(tmp_path))
    found = {"weight": torch.zeros(3)}
    load(found, checkpoint_id=tmp_path, no_dist=True)
    assert found["weight"].tolist() == [1, 1, 1]


def own(kept: dict[str, Any]) -> Generator[None, None, object]:
    """Writes what it hasn't copied."""
    state, unused = kept["net"], kept["net"]
    del unused
    yield
    return len(state)


def copied(kept: dict[str, Any]) -> Generator[None, None, object]:
    """Uses names of the role's own again, of other things."""
    taken, tensor = {}, None
    for name, tensor in kept["net"].items():
        taken[name] = tensor.clone()
    state = kept["net"]
    yield
    state = list(taken.values())
    return len(state), [name for name, tensor in taken.items()]


def closed_over(kept: dict[str, Any]) -> Generator[None, None, object]:
    """Has it by a function."""
    state = kept["net"]

    def write() -> int:
        return len(state)

    yield
    return write()


def by_another(kept: dict[str, Any]) -> Generator[None, None, object]:
    """Has another one write it."""
    state = kept["net"]
    yield
    return [sum(map(len, state)), [each for each in state if len(state)]]


@pytest.mark.parametrize(
    ("save", "names"), [(own, ["state"]), (copied, ["taken"]), (closed_over, []), (by_another, ["state"])]
)
def test_what_is_read_after_the_yield(save: Any, names: list[str]) -> None:
    """Of a frame those variables that are read before they are set, if there may be tensors in them."""
    going = save({"net": {"weight": torch.zeros(2)}})
    next(going)
    assert list(variables(going.gi_frame)) == names


class Owner(Role):
    """Has what the second halves below read."""

    def __init__(self) -> None:
        self.n, self.big, self.files = 1, 1000, 0
        self.kept = {"weight": torch.zeros(2)}
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters())

    @property
    def doubled(self) -> int:
        return 2 * self.n

    def step(self) -> None:
        """As a call that goes on meanwhile."""
        self.n, self.big, self.files = 3, int("1000"), 5
        self.kept["weight"] += 1
        self.net(torch.ones(1)).sum().backward()
        self.optimizer.step()

    def number(self) -> Generator[None, None, object]:
        yield
        return self.n, self.big

    def copy(self) -> Generator[None, None, object]:
        n = self.n
        yield
        self.files += 1
        return n, self.ctx, self.doubled, self.step, self.files

    def function(self) -> Generator[None, None, object]:
        yield
        return [key for key in "ab" if self.n], (lambda: self.kept)

    def alias(self) -> Generator[None, None, object]:
        me = self
        yield
        return len(me.kept)

    def delegated(self) -> Generator[None, None, object]:
        return (yield from self.number())

    def states(self) -> Generator[None, None, object]:
        yield
        return self.net.state_dict(), self.optimizer.state_dict()

    def own_state(self) -> Generator[None, None, object]:
        state = host_copy(self.net.state_dict())
        yield
        return self.net.extra_repr(), state


@pytest.mark.parametrize(
    ("save", "changed"),
    [
        (Owner.number, ["self.n"]),
        (Owner.copy, []),
        (Owner.function, ["self.n", "self.kept"]),
        (Owner.alias, ["self.kept"]),
        (Owner.delegated, ["self.n"]),
        (Owner.states, ["self.net", "self.optimizer"]),
        (Owner.own_state, []),
    ],
)
def test_what_of_the_role_is_read_after_the_yield(save: Any, changed: list[str]) -> None:
    """Attributes that were set anew, and tensors in them: not what is equal, or its own doing, and no methods."""
    owner = Owner()
    going = save(owner)
    next(going)
    read = ReadLater(going, owner, strict=False)
    assert read.changed() == []
    owner.step()
    assert read.changed() == changed

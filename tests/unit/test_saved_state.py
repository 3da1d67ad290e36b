"""Copies of a role's state on the host, for the role's `save`."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colocate import Role
from colocate.torch import host_copy, save_state


def test_a_copy_has_nothing_of_the_state() -> None:
    """A host copy has the state's structure, types, ties, shapes and strides, and none of its memory."""
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
    """Return the tensors and arrays in a value, as arrays."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, torch.Tensor):
        return [value.to_dense().detach().numpy()]
    return [value] if isinstance(value, np.ndarray) else []


def test_a_state_is_written_at_once_outside_of_a_checkpoint(tmp_path: Path) -> None:
    """`save_state` outside any worker writes a checkpoint that torch can load."""
    from torch.distributed.checkpoint.state_dict_loader import load

    class Learner(Role):
        def save(self, directory: str) -> None:
            save_state({"weight": torch.ones(3)}, directory, self.ctx)

    Learner().save(str(tmp_path))
    found = {"weight": torch.zeros(3)}
    load(found, checkpoint_id=tmp_path, no_dist=True)
    assert found["weight"].tolist() == [1, 1, 1]

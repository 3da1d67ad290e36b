"""Shapes without values, and the values that are known all the same."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._device import _device_constructors

from colocate._job.meta_device import advice, meta_device, step

_STARTS = {
    "numbers": lambda: torch.tensor([3.0, 1.0, 2.0]),
    "range": lambda: torch.arange(3, device=torch.get_default_device()).float(),
    "line": lambda: torch.linspace(0, 1, 3),
    "unknown": lambda: torch.rand(3),
}
_GENERATOR = torch.Generator()


class Other(torch.nn.Parameter):
    """What is written by way of this isn't told."""


_OPERATIONS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "less": lambda a, b: (a < b).float(),
    "add in place": lambda a, b: a.add_(b),
    "and of a part": lambda a, b: a[:1].mul_(b[1:2]),
    "set": lambda a, b: a.__setitem__(slice(1, 2), b[:1]),
    "random": lambda a, b: a.clone().uniform_(),
    "random in place": lambda a, b: a.uniform_(),
    "of values": lambda a, b: a * float(b.detach().sum()),
    "by index": lambda a, b: a[b.argsort()],
    "parts": lambda a, b: torch.stack(a.unbind()).flip(0),
    "view": lambda a, b: a.view(3),
    "data": lambda a, b: a.data,
    "detached": lambda a, b: a.detach(),
    "parameter": lambda a, b: torch.nn.Parameter(a, requires_grad=False),
    "other data": lambda a, b: setattr(a, "data", b.clone()),
    "copy": lambda a, b: copy.deepcopy(a),
    "copied": lambda a, b: a.copy_(b),
    "array": lambda a, b: torch.tensor(a.numpy()),
    "out": lambda a, b: torch.neg(a, out=b) if a.shape == b.shape else None,
    "draw": lambda a, b: a.uniform_(generator=_GENERATOR),
    "draw many": lambda a, b: torch.empty(5000).uniform_(generator=_GENERATOR),
    "other kind": lambda a, b: a.as_subclass(Other).add_(1),
    "part as data": lambda a, b: setattr(a, "data", a.data[1:]),
    "gradient": lambda a, b: setattr(a, "grad", b),
    "backward": lambda a, b: a.requires_grad_().sum().backward(),
    "statistics": lambda a, b: torch.nn.functional.batch_norm(torch.ones(4, 3), a, b, training=True, momentum=0.5),
    "with the host's": lambda a, b: torch.broadcast_tensors(torch.zeros(3, device="cpu"), a)[1],
    "to the host": lambda a, b: a.cpu(),
    "dirichlet": lambda a, b: torch._sample_dirichlet(a),
}


def values(start: list[str], steps: list[tuple[str, int, int]]) -> tuple[list[Any], int]:
    """What small programs come to, None for what isn't known; and how many of their steps could be gone."""
    _GENERATOR.manual_seed(0)
    held = [_STARTS[each]() for each in start]
    gone = 0
    with contextlib.suppress(RuntimeError, TypeError, IndexError):
        for name, first, second in steps:
            made = _OPERATIONS[name](held[first % len(held)], held[second % len(held)])
            held += [made] if made is not None and made.shape == (3,) else []
            gone += 1
    found: list[Any] = []
    for each in held:
        try:
            found.append(each.tolist())
        except RuntimeError:
            found.append(None)
    return found, gone


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.sampled_from(sorted(_STARTS)), min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(sorted(_OPERATIONS)), st.integers(0, 9), st.integers(0, 9)), max_size=8),
)
def test_values_that_are_told_are_right(start: list[str], steps: list[tuple[str, int, int]]) -> None:
    """Whatever was written into tensors, or into what they share memory with."""
    before = torch.get_rng_state()
    with meta_device():
        _, gone = values(start, steps)
    assert torch.equal(torch.get_rng_state(), before)
    real, gone = values(start, steps[:gone])
    with meta_device():
        told, _ = values(start, steps[:gone])
    assert len(told) == len(real)
    for ours, its in zip(told, real, strict=True):
        assert ours is None or ours == its
    if "unknown" not in start and not steps:
        assert None not in told


def test_numbers_of_a_program_are_known() -> None:
    """As constructors ask for them."""
    with meta_device():
        rates = [each.item() for each in torch.linspace(0, 0.3, 4)]
        sizes = [torch.zeros(int(each)).numel() for each in torch.tensor([1, 2, 3])]
        count = torch.tensor(0)
        count += 5
        places = torch.tensor([1.0, 0.0, 2.0]).nonzero()
        array = torch.arange(3).numpy()
        assert (int(count), places.is_meta) == (5, True)
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    assert sizes == [1, 2, 3]
    assert array.tolist() == [0, 1, 2]


def test_makers_that_somebody_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds them by identity, once in a process, whatever is in their place then."""
    _device_constructors.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "linspace", lambda: None)
        with torch.device("meta"):
            torch.ones(1)
    try:
        with torch.device("meta"):
            assert not torch.linspace(0, 1, 3).is_meta  # else torch has mended it, and nothing is to be done
        with meta_device():
            assert torch.linspace(0, 1, 3).is_meta
            with torch.device("cpu"):
                assert torch.ones(3).device.type == "cpu"
    finally:
        _device_constructors.cache_clear()


def test_a_default_device_of_its_own() -> None:
    """It is for all that is made from then on."""
    with meta_device():
        torch.set_default_device("cpu")
        try:
            made = [torch.ones(3), torch.rand(3), torch.nn.Linear(1, 1).weight]
        finally:
            torch.set_default_device(None)
    assert {each.device.type for each in made} == {"cpu"}


def test_a_copy_of_a_model_with_buffers() -> None:
    """Each is copied once, however many there are; what is known of it is known of the copy, too."""
    with meta_device():
        net = torch.nn.ModuleList([torch.nn.BatchNorm1d(2) for _ in range(300)])
        net[0].running_mean += 1
        copied = copy.deepcopy(net)
        net[1].running_mean += 1
        means = [copied[place].running_mean.tolist() for place in range(3)]
    assert means == [[1, 1], [0, 0], [0, 0]]


def test_functions_that_are_transformed() -> None:
    """By `torch.func`, though they write into what they make."""

    def squares(x: torch.Tensor) -> torch.Tensor:
        return (torch.ones(3) * x).mul_(x).sum()

    with meta_device():
        assert torch.func.grad(squares)(torch.ones(3)).shape == (3,)


def test_others_are_not() -> None:
    """What is random, what is inferred from it, what is large, what is for inference."""
    with meta_device(), torch.inference_mode():
        inferred = torch.zeros(2)
    with meta_device():
        known, weight = torch.zeros(2), torch.empty(2)
        known += weight
        drawn = torch.zeros(3).uniform_(generator=torch.Generator())
        for each in (weight, known, torch.rand(2), torch.zeros(5000), inferred, drawn):
            with pytest.raises(RuntimeError, match="meta tensor") as caught:
                each.sum().item()
            assert "nothing has values there" in advice(caught.value)
        with pytest.raises(NotImplementedError, match="Meta tensors"):
            torch.distributions.Dirichlet(torch.ones(3)).sample()


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-3)),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        torch.optim.NAdam,
        torch.optim.Adafactor,
        torch.optim.Rprop,
    ],
)
def test_steps(make: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]) -> None:
    """They make as much as on the host, also where they ask for values."""

    def state(device: str) -> list[dict[str, int]]:
        net = torch.nn.Linear(8, 4, device=device)
        optimizer = make(net.parameters())
        if device == "cpu":
            for parameter in net.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        else:
            step(optimizer)
        held = [optimizer.state[each] for each in net.parameters()]
        return [{name: value.nbytes for name, value in each.items() if torch.is_tensor(value)} for each in held]

    with meta_device():
        planned = state("meta")
    assert planned == state("cpu")


def test_a_step_that_needs_a_closure() -> None:
    """It is refused: what it keeps depends on that."""
    with meta_device():
        optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(2))])
        with pytest.raises(TypeError, match="a step of LBFGS needs a closure"):
            step(optimizer)


def test_advice_about_generators() -> None:
    """There is none for that device."""
    with meta_device(), pytest.raises(RuntimeError) as caught:
        torch.Generator(device="meta")
    assert "self.ctx.generator" in advice(caught.value)
    assert advice(ValueError("something else")) == ""

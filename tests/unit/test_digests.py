"""Digests of weights notice each change, and are the same wherever they are made."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from colocate.errors import ConfigError
from colocate.features.weights import digests
from colocate.features.weights.digests import TensorDigests
from colocate.features.weights.messages import Digest
from colocate.features.weights.weights import find_differences

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
SIZES = [0, 1, 3, 7, 8, 9, 63, 64, 1001]


def digest(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Digest:
    found = TensorDigests("policy.actor")
    found.add_tensor("one", tensor, dtype)
    return found.collect_digests()["one"]


def drawn(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return so many elements of random bits."""
    generator = torch.Generator().manual_seed(size)
    if dtype == torch.bool:
        return torch.randint(2, (size,), generator=generator).bool()
    bits = torch.randint(256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype)


def by_hand(data: bytes) -> int:
    """Return the digest of bytes by its definition."""
    most, total = 2**64 - 1, 0
    for place in range(0, len(data), 8):
        word = int.from_bytes(data[place : place + 8], "little")
        word = (word + (place // 8 + 1) * 0x9E3779B97F4A7C15) & most
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
            word = ((word ^ (word >> 33)) * factor) & most
        total = (total + word) & most
    return total - 2**64 if total >> 63 else total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_follows_the_definition(dtype: torch.dtype) -> None:
    """Each dtype and size has the digest of the definition: no version of torch, nor a device, may change it."""
    for size in SIZES:
        tensor = drawn(size, dtype)
        bits = bytes(tensor.view(torch.uint8).tolist())
        assert digest(tensor).content == ((size,), str(dtype).removeprefix("torch."), by_hand(bits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_bit_counts(dtype: torch.dtype) -> None:
    """Each bit of a tensor changes its digest."""
    tensor = drawn(9, dtype)
    bits, before = tensor.view(torch.uint8), digest(tensor).value
    for place, bit in itertools.product(range(len(bits)), range(1 if dtype == torch.bool else 8)):
        bits[place] ^= 1 << bit
        assert digest(tensor).value != before
        bits[place] ^= 1 << bit
    assert digest(tensor).value == before


def test_digest_detects_changes_that_sums_miss() -> None:
    """Digests notice swapped elements, halves and rows, paired signs, and amounts moved between elements."""
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    found = [tensor, tensor.flip(0), tensor.t(), -tensor, tensor.roll(1, 0), tensor.roll(1, 1), tensor.roll(2, 1)]
    found += [tensor.index_select(0, torch.tensor([1, 0, *range(2, 64)])), tensor.sort().values]
    pairs = tensor.clone()
    pairs[0, 1].neg_()  # the uppermost bits of two words
    pairs[0, 3].neg_()
    words = tensor.clone()
    words.view(torch.int64)[0, 0] += 1
    words.view(torch.int64)[0, 1] -= 1
    zeros = torch.zeros(64, 64)
    found += [pairs, words, zeros, -zeros, torch.ones(64, 64), torch.full((64, 64), 2.0)]
    assert len({digest(each).value for each in found}) == len(found)


def test_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest depends on the order of a tensor's elements, not on their layout or on the size of a step."""
    whole = torch.arange(7001, dtype=torch.int16).view(torch.bfloat16)
    for tensor in (whole[1:], whole[3:-1], whole[1:].view(70, 100).t(), whole.expand(3, -1), whole[::3], whole[5]):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        assert digest(tensor) == digest(copy)
        monkeypatch.setattr(digests, "_ON_HOST", 100)
        assert digest(tensor) == digest(copy)
        monkeypatch.undo()
    conjugate = torch.complex(torch.ones(3), torch.ones(3)).conj()
    assert digest(conjugate) == digest(conjugate.resolve_conj())


def test_conversions() -> None:
    """A digest in another floating-point type is that of a copy in the type; other types aren't converted."""
    source = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64):
        target = torch.empty(1000, dtype=dtype)
        assert digest(source, dtype) == digest(target.copy_(source))
    assert digest(source, torch.int8).dtype == "float32"
    assert digest(torch.arange(3), torch.float32).dtype == "int64"


def test_tensor_without_plain_bits_is_refused() -> None:
    """A tensor without plain bits on this machine is refused."""
    words = r"named_weights of policy\.actor: one is {}.*its bits can't be compared"
    with pytest.raises(ConfigError, match=words.format("without memory")):
        digest(torch.empty(3, device="meta"))
    with pytest.raises(ConfigError, match=words.format(r"no plain tensor \(Tensor, float32\)")):
        digest(torch.eye(3).to_sparse())


def test_names_of_one_tensor() -> None:
    """A tensor arrives under all of its names at once; an equal tensor with memory of its own doesn't."""
    target: Any = {"head": torch.ones(4), "other": torch.ones(4)}
    found = TensorDigests("taker")
    for name, tensor in {"tied": target["head"], **target}.items():
        found.add_tensor(name, tensor)
    has, one = found.collect_digests(), digest(torch.ones(4))
    assert find_differences({"head": one, "other": one}, has) == {}
    assert find_differences({"tied": one, "other": one}, has) == {}
    assert find_differences({"head": one}, has) == {"other": "hasn't come"}
    two = digest(torch.full((4,), 2.0))
    assert find_differences({"head": two, "other": one, "third": one}, has) == {
        "head": "has other bits",
        "third": "isn't among those that it gives back",
    }
    assert find_differences({"head": digest(torch.ones(5)), "other": one}, has) == {
        "head": "is [4] float32, and [5] float32 was to arrive"
    }

"""Compute eight-byte digests of tensors on the tensors' devices, for comparisons of weights.

A digest covers a tensor's bits in the order of the elements: 0.0 and -0.0 differ, and so do NaNs of different bits.
It is the sum, modulo 2**64, over all words of eight bytes, of a permutation of word and position. One changed word
always changes the digest. Two swapped words change it, too, except for a chance of one in 2**64. Sums of integers
depend neither on a device nor on the order of the summation. Shape and dtype are compared separately.
"""

from __future__ import annotations

import torch

from colocate._role.on_mesh import is_on_mesh
from colocate.errors import ConfigError
from colocate.features.weights.messages import Digest

_ON_HOST, _ON_DEVICE = 1 << 15, 1 << 23
"""Words mixed at once: on the host, as many as fit a core's cache with two copies."""
_WORD = 8
_BITS = 64
# Shift and factors are from MurmurHash3's 64-bit finalizer; the stride is an odd number without a pattern.
_SHIFT, _FACTORS, _STRIDE = 33, (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53), 0x9E3779B97F4A7C15


class TensorDigests:
    """Collects digests of tensors. The digests stay on the tensors' devices until requested."""

    def __init__(self, whose: str) -> None:
        """Create an empty collection; `whose` is the name of the tensors' owner in error texts."""
        self._owner = whose
        self._pending: dict[str, tuple[torch.Tensor, tuple[int, ...], str, tuple[object, ...]]] = {}
        self._places: dict[torch.device, torch.Tensor] = {}

    def add_tensor(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Add the digest of a tensor's current bits. With `dtype`, a floating-point tensor is first converted.

        Raises:
            ConfigError: The tensor is a shard, has no memory, or is no plain tensor: not all bits are here.
        """
        _refuse_tensor(name, tensor, self._owner)
        memory = tensor.device, tensor.data_ptr(), tensor.stride()
        values = tensor.detach()
        if dtype is not None and dtype.is_floating_point and values.is_floating_point():
            values = values.to(dtype)
        self._pending[name] = self._digest_tensor(values), tuple(values.shape), dtype_name(values.dtype), memory

    def collect_digests(self) -> dict[str, Digest]:
        """Return the digests by name, in order, with one transfer per device."""
        values: dict[str, int] = {}
        for device in {digest.device for digest, *_ in self._pending.values()}:
            names = [name for name, (digest, *_) in self._pending.items() if digest.device == device]
            stacked = torch.stack([self._pending[name][0] for name in names])
            values |= zip(names, stacked.tolist(), strict=True)
        first: dict[tuple[object, ...], str] = {}
        # Names are tied only if the bits are equal, too, because the memory of a former tensor may be reused.
        return {
            name: Digest(shape, dtype, values[name], first.setdefault((*memory, shape, dtype, values[name]), name))
            for name, (_, shape, dtype, memory) in self._pending.items()
        }

    def _digest_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        whole = data.numel() // _WORD * _WORD
        if whole:
            words = data[:whole]
            # A view that begins between two words is copied.
            words = (words.clone() if words.storage_offset() % _WORD or words.data_ptr() % _WORD else words).view(
                torch.int64
            )
            self._accumulate_words(words, 0, total)
        if whole < data.numel():
            last = data.new_zeros(_WORD)
            last[: data.numel() - whole] = data[whole:]
            self._accumulate_words(last.view(torch.int64), whole // _WORD, total)
        return total

    def _accumulate_words(self, words: torch.Tensor, before: int, total: torch.Tensor) -> None:
        """Mix words of a tensor, and add the results to `total`; `before` is the number of earlier words."""
        device = words.device
        most = _ON_HOST if device.type == "cpu" else _ON_DEVICE
        size = min(most, words.numel())
        places = self._places.get(device)
        if places is None or len(places) < size:
            places = torch.arange(size, dtype=torch.int64, device=device).mul_(_to_signed(_STRIDE))
            self._places[device] = places
        mixed, shifted = torch.empty_like(places[:size]), torch.empty_like(places[:size])
        for begin in range(0, words.numel(), size):
            part = words[begin : begin + size]
            count = part.numel()
            a, b = mixed[:count], shifted[:count]
            torch.add(part, places[:count], out=a)
            a.add_(_to_signed((before + begin + 1) * _STRIDE))
            for factor in (*_FACTORS, 1):
                # Mask the sign bits, because torch's right shift is arithmetic, and would lose information.
                torch.bitwise_right_shift(a, _SHIFT, out=b)
                a.bitwise_xor_(b.bitwise_and_((1 << _BITS - _SHIFT) - 1))
                if factor != 1:
                    a.mul_(_to_signed(factor))
            total.add_(a.sum())


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the "torch." prefix."""
    return str(dtype).removeprefix("torch.")


def _to_signed(number: int) -> int:
    number &= (1 << _BITS) - 1
    return number - (1 << _BITS) if number >> (_BITS - 1) else number


def _refuse_tensor(name: str, tensor: torch.Tensor, whose: str) -> None:
    if is_on_mesh(tensor):
        why = "one of shards: gather it (tensor.full_tensor()), as colocate.torch.named_weights does"
    elif tensor.is_meta:
        why = "without memory (on the meta device)"
    elif tensor.is_quantized or tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        why = f"no plain tensor ({type(tensor).__name__}, {dtype_name(tensor.dtype)}): yield what it is made of"
    else:
        return
    raise ConfigError(f"named_weights of {whose}: {name} is {why}; its bits can't be compared")

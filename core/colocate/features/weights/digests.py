"""Digests of tensors, eight bytes each, made where a tensor lies: by them both ends of a sync are compared.

A digest is of a tensor's bits in the order of its elements: 0.0 and -0.0 have different ones, and so have two NaNs of
different bits. It is the sum, modulo 2**64, over all words of eight bytes of a permutation of word and place. So one
word that is another one always changes it, as two words do that have changed places, but for one chance in 2**64;
sums of integers depend neither on a device nor on the order in which one adds them up. Shape and dtype are beside it.
"""

from __future__ import annotations

import torch

from colocate._role.on_mesh import is_on_mesh
from colocate.errors import ConfigError
from colocate.features.weights.messages import Digest

_ON_HOST, _ON_DEVICE = 1 << 15, 1 << 23
"""Words that are mixed at once: on the host as many as a core's cache has beside two copies of them."""
_WORD = 8
_BITS = 64
# Of MurmurHash3's 64-bit finalizer; between places lies an odd number without a pattern.
_SHIFT, _FACTORS, _STRIDE = 33, (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53), 0x9E3779B97F4A7C15


class Digests:
    """The digests of some tensors, which stay on their devices until somebody asks for them."""

    def __init__(self, whose: str) -> None:
        """Args: whose: What has the tensors, as errors say it."""
        self._whose = whose
        self._found: dict[str, tuple[torch.Tensor, tuple[int, ...], str, tuple[object, ...]]] = {}
        self._places: dict[torch.device, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Digest a tensor as it is now; with `dtype` as it is when converted to that, if both are floating-point.

        Raises:
            ConfigError: Its bits aren't all here: it is one of shards, or has no memory, or is no plain tensor.
        """
        _refuse(name, tensor, self._whose)
        memory = tensor.device, tensor.data_ptr(), tensor.stride()
        found = tensor.detach()
        if dtype is not None and dtype.is_floating_point and found.is_floating_point():
            found = found.to(dtype)
        self._found[name] = self._digest(found), tuple(found.shape), dtype_name(found.dtype), memory

    def told(self) -> dict[str, Digest]:
        """Return the digests by name, in order: all of a device come from there at once."""
        values: dict[str, int] = {}
        for device in {each.device for each, *_ in self._found.values()}:
            names = [name for name, (each, *_) in self._found.items() if each.device == device]
            stacked = torch.stack([self._found[name][0] for name in names])
            values |= zip(names, stacked.tolist(), strict=True)
        first: dict[tuple[object, ...], str] = {}
        # Memory that was made for one tensor may have been another's before: only what has its bits, too, is it.
        return {
            name: Digest(shape, dtype, values[name], first.setdefault((*memory, shape, dtype, values[name]), name))
            for name, (_, shape, dtype, memory) in self._found.items()
        }

    def _digest(self, tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        whole = data.numel() // _WORD * _WORD
        if whole:
            words = data[:whole]
            # A view into the midst of other memory may begin between two words.
            words = (words.clone() if words.storage_offset() % _WORD or words.data_ptr() % _WORD else words).view(
                torch.int64
            )
            self._add_up(words, 0, total)
        if whole < data.numel():
            last = data.new_zeros(_WORD)
            last[: data.numel() - whole] = data[whole:]
            self._add_up(last.view(torch.int64), whole // _WORD, total)
        return total

    def _add_up(self, words: torch.Tensor, before: int, total: torch.Tensor) -> None:
        """Add what words come to, of which so many lie before them."""
        device = words.device
        most = _ON_HOST if device.type == "cpu" else _ON_DEVICE
        size = min(most, words.numel())
        places = self._places.get(device)
        if places is None or len(places) < size:
            places = torch.arange(size, dtype=torch.int64, device=device).mul_(_signed(_STRIDE))
            self._places[device] = places
        mixed, shifted = torch.empty_like(places[:size]), torch.empty_like(places[:size])
        for begin in range(0, words.numel(), size):
            part = words[begin : begin + size]
            count = part.numel()
            a, b = mixed[:count], shifted[:count]
            torch.add(part, places[:count], out=a)
            a.add_(_signed((before + begin + 1) * _STRIDE))
            for factor in (*_FACTORS, 1):
                # Without the sign, which a shift of torch's goes on with: that would lose a bit.
                torch.bitwise_right_shift(a, _SHIFT, out=b)
                a.bitwise_xor_(b.bitwise_and_((1 << _BITS - _SHIFT) - 1))
                if factor != 1:
                    a.mul_(_signed(factor))
            total.add_(a.sum())


def dtype_name(dtype: torch.dtype) -> str:
    """Return what torch calls a dtype, without where it is."""
    return str(dtype).removeprefix("torch.")


def _signed(number: int) -> int:
    """Return a number modulo 2**64 as torch's signed integers have it."""
    number &= (1 << _BITS) - 1
    return number - (1 << _BITS) if number >> (_BITS - 1) else number


def _refuse(name: str, tensor: torch.Tensor, whose: str) -> None:
    if is_on_mesh(tensor):
        why = "one of shards: gather it (tensor.full_tensor()), as colocate.torch.named_weights does"
    elif tensor.is_meta:
        why = "without memory (on the meta device)"
    elif tensor.is_quantized or tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        why = f"no plain tensor ({type(tensor).__name__}, {dtype_name(tensor.dtype)}): yield what it is made of"
    else:
        return
    raise ConfigError(f"named_weights of {whose}: {name} is {why}; its bits can't be compared")

"""Roles whose memory sleeps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import colocate
from colocate import Role, method
from colocate._system.room import read_free_memory
from colocate.testing.gate import Address, pass_gate
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = import_optional("torch")

_MIB = 2**20


class Dozing(Role):
    """A role that trains a model of one matrix, with tied weights, views, an optimizer and a cache."""

    def __init__(self, mib: int = 1, hooks: bool = False) -> None:
        device = self.ctx.device
        generator = torch.Generator(device).manual_seed(self.ctx.rank)
        self.net = torch.nn.Linear(mib * _MIB // 4096, 1024, bias=False, device=device)
        self.tied = torch.nn.Linear(mib * _MIB // 4096, 1024, bias=False, device=device)
        self.tied.weight = self.net.weight
        self.net.weight.data.normal_(std=0.02, generator=generator)
        self.net.register_buffer("scale", torch.ones(1024, device=device))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.9)
        self.cache = [torch.randn(mib * _MIB // 4, device=device, generator=generator)]
        self.views: dict[str, Any] = {"view": self.net.weight.detach()[3:]}
        self._hook_calls: list[str] = []
        self._failing: dict[str, BaseException] = {}
        if hooks:
            self.sleep, self.wake = self._sleep, self._wake

    def _sleep(self, tags: Sequence[str]) -> None:
        self._record_hook("sleep", tags)

    def _wake(self, tags: Sequence[str]) -> None:
        self._record_hook("wake", tags)

    def _record_hook(self, hook: str, tags: Sequence[str]) -> None:
        if hook in self._failing:
            raise self._failing[hook]
        self._hook_calls.append(f"{hook} {' '.join(tags)}")

    @method(awake=())
    def told(self) -> list[str]:
        return self._hook_calls

    @method(awake=())
    def fail_hook(self, rank: int, error: BaseException | None, hook: str = "sleep") -> None:
        if self.ctx.rank == rank:
            self._failing = {hook: error} if error else {}

    @method
    def train(self) -> str:
        """Do a step, which makes gradients and optimizer state; return a digest of the weights."""
        return self._train()

    def _train(self) -> str:
        self.net(torch.ones(1, self.net.in_features, device=self.ctx.device)).square().sum().backward()
        self.optimizer.step()
        return self._weights()

    @method
    def train_at(self, gate: Address) -> str:
        pass_gate(gate)
        return self._train()

    @method(awake=("weights",))
    def look(self) -> str:
        return self._weights()

    @method(awake=("weights",))
    def refill(self, mib: int) -> None:
        """Replace the cache, even if the old one sleeps."""
        self.cache[:] = [torch.ones(mib * _MIB // 4, device=self.ctx.device)]

    @method
    def remember(self, *values: Any) -> None:
        self.cache[:] = values

    @method
    def digest(self) -> tuple[str, str]:
        """Digest the weights with all their views, and all other tensors."""
        rest = [self.net.weight.grad, *self.cache, self.net.get_buffer("scale")]
        rest += [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return self._weights(), digest(*(tensor for tensor in rest if tensor is not None))

    @method
    def parts(self) -> dict[str, str]:
        """Return a digest of each tag's memory that isn't all zeros."""
        momentum = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        grads = [] if self.net.weight.grad is None else [self.net.weight.grad]
        parts = {"grads": grads, "optimizer": momentum, "cache": self.cache}
        digests = {tag: digest(*part) for tag, part in parts.items() if any(tensor.any() for tensor in part)}
        return {"weights": self._weights(), **digests}

    @method
    def objects(self) -> list[int]:
        tensors = [self.net.weight, self.tied.weight, self.net.weight.grad, *self.cache]
        return [id(tensor) for tensor in tensors if tensor is not None]

    @method
    def look_by_array(self) -> float:
        """Keep a NumPy array of the weights, and return its sum."""
        if "array" not in self.views:
            self.views["array"] = self.net.weight.detach().cpu().numpy()[:, 1:]
        return float(self.views["array"].sum())

    @method(awake=())
    def is_on_gpu(self) -> bool:
        return self.ctx.device.type != "cpu"

    @method
    def addresses(self) -> list[int]:
        """Return the addresses of the constructor's tensors."""
        return [tensor.data_ptr() for tensor in (self.net.weight, self.net.get_buffer("scale"), *self.cache)]

    @method
    def weights(self) -> Tensor:
        return self.net.weight.detach()

    @method
    def gradient(self) -> Tensor:
        assert self.net.weight.grad is not None
        return self.net.weight.grad

    @method
    def caches(self) -> Tensor:
        cache: Tensor = self.cache[0]
        return cache

    @method
    def make(self, elements: int) -> Tensor:
        return torch.ones(elements, device=self.ctx.device)

    @method
    def fail(self, rank: int) -> None:
        if self.ctx.rank == rank:
            raise ValueError("a bad batch")

    @method
    def let_go(self) -> None:
        """Drop the gradients, the cache and the optimizer's state."""
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        self.cache.clear()

    @method(awake=())
    def list_asleep(self) -> list[str]:
        return list_asleep(self.ctx)

    @method(awake=())
    def lack_room(self, rank: int | None) -> None:
        """Make a rank find no free memory; None undoes this for all ranks."""
        _find_sleeper(self.ctx).read_free_memory = (lambda: 0) if self.ctx.rank == rank else read_free_memory

    def _weights(self) -> str:
        return digest(self.net.weight, self.tied.weight, *self.views.values())

    def save(self, directory: str) -> None:
        assert not list_asleep(self.ctx)
        if "save" in self._failing:
            raise self._failing["save"]
        Path(directory, str(self.ctx.rank)).touch()

    def restore(self, directory: str) -> None:
        """Restore nothing: there is no state."""


class Watching(Dozing):
    """A role that records another role's sleeping tags, at its construction and in training."""

    def __init__(self, other: str, mib: int) -> None:
        self._other_role = other
        self._observations = [self._look()]
        super().__init__(mib)

    @method
    def train(self) -> str:
        self._observations.append(self._look())
        return self._train()

    @method(awake=())
    def has_seen(self) -> list[list[str]]:
        return self._observations

    def _look(self) -> list[str]:
        return list(_find_sleeper(self.ctx).asleep.sleeping_tags(self._other_role))


class Sharing(Role):
    """A role that shares another role's model."""

    net: Any = None

    @method
    def share(self, role: str) -> None:
        self.net = self.ctx.sibling(role, Dozing).net

    @method
    def digest(self) -> str:
        return digest(self.net.weight)

    @method
    def fail_at(self, gate: Address) -> None:
        pass_gate(gate)
        raise ValueError("a bad batch")

    @method
    def total(self, values: list[Tensor]) -> float:
        return float(sum(value.sum().item() for value in values))


def list_asleep(ctx: colocate.Context) -> list[str]:
    """Return the role's sleeping tags in this worker."""
    return list(_find_sleeper(ctx).asleep.sleeping_tags(ctx.role))


def _find_sleeper(ctx: colocate.Context) -> Any:
    reach: Any = ctx._reach
    return reach.__self__.get_feature("memory").sleeper


def digest(*values: Any) -> str:
    """Digest the bytes of tensors and arrays."""
    checksum = 0
    for value in values:
        # Copied first: an array of the tensor itself would share its memory with NumPy.
        array = value.detach().cpu().clone().numpy() if isinstance(value, torch.Tensor) else value
        checksum = zlib.crc32(array.tobytes(), checksum)
    return f"{checksum:08x}"

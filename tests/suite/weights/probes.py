"""Roles whose weights are synced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import colocate
from colocate import Concat, Role, Scatter, Weights, method
from colocate.testing.gate import Address, pass_gate
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch
else:
    torch = import_optional("torch")

Fault = Literal[
    "raises",
    "twice",
    "again",
    "none",
    "other kind",
    "nothing",
    "other",
    "nan",
    "keeps",
    "leaves",
    "takes nothing",
    "skips",
    "writes",
    "writes aside",
    "keeps aside",
    "scratch",
    "buffers",
    "waits",
    "ends badly",
    "writes late",
    "drifts",
    "stale",
    "bit",
    "swaps",
    "sign",
    "hides",
    "adds",
    "shard",
]


class Failure(Exception):
    """The error of a role that was set to fail."""


def make_net(width: int, seed: int, device: Any) -> Any:
    """Return two layers with tied weights, and a buffer."""
    net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width, bias=False))
    net[1].weight = net[0].weight
    generator = torch.Generator().manual_seed(seed)  # Threads share torch's default generator.
    for parameter in net.parameters():
        parameter.data.normal_(generator=generator)
    net[0].register_buffer("scale", torch.ones(width))
    return net.to(device)


class _NetRole(Role):
    def __init__(self, width: int = 8, seed: int = 0, sharded: bool = False) -> None:
        self.net = make_net(width, seed, self.ctx.device)
        if sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.ctx.device_mesh())
        self.fault: Fault | None = None
        self.cache = torch.ones(1 << 18, device=self.ctx.device)
        self.stored: list[Any] = []
        self.gate: Address | None = None

    @method(awake=())
    def stop_at(self, gate: Address | None) -> None:
        """Set the gate at which the next syncs wait."""
        self.gate = gate

    @method(awake=())
    def mapped(self) -> int:
        """Return how many transport files this process has mapped."""
        with open("/proc/self/maps") as file:
            return sum("memfd:colocate" in line for line in file)

    @method(awake=())
    def fail(self, rank: int, fault: Fault | None) -> None:
        if self.ctx.rank == rank:
            self.fault = fault

    @method
    def as_torch_gathers(self) -> list[tuple[str, bool]]:
        """Return for each weight, in order, whether it equals torch's own gathering of the shards."""
        state, results = self.net.state_dict(), []
        for name, tensor in colocate.torch.named_weights(self.net):
            whole = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
            results.append((name, torch.equal(tensor, whole)))
        return results

    @method(awake=())
    def restart(self, rank: int) -> None:
        if self.ctx.rank == rank:
            import os

            os._exit(1)

    @method(awake=("weights",))
    def look(self) -> tuple[list[float], int]:
        """Return the sums of the whole weights, and their version."""
        sums = [float(tensor.double().sum()) for _, tensor in colocate.torch.named_weights(self.net)]
        return sums, self.ctx.weights_version

    @method
    def address(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.net.parameters()]

    def save(self, directory: str) -> None:
        torch.save(self.net.state_dict(), f"{directory}/{self.ctx.rank}")

    def restore(self, directory: str) -> None:
        self.net.load_state_dict(torch.load(f"{directory}/{self.ctx.rank}"))


class _NamedWeights:
    """An iterator of weights with given specs, true or false."""

    def __init__(self, weights: Iterator[Any], specs: Any) -> None:
        self.weights, self.specs = weights, specs

    def __iter__(self) -> Iterator[Any]:
        return self.weights


class Giver(_NetRole):
    """A source whose weights change with each step."""

    @method
    def step(self, gate: Address | None = None) -> None:
        if gate is not None:
            pass_gate(gate)
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.add_(1)
            if self.fault == "drifts":
                self.net[0].weight[0, 0].neg_()
                self.fault = None

    def renew(self) -> None:
        colocate.torch.renew(self.net)

    @method(awake=("weights",))
    def named_weights(self) -> Any:
        weights = colocate.torch.named_weights(self.net)
        if self.fault is None:
            return weights
        if self.fault == "none":
            return None
        if self.fault in ("waits", "ends badly"):
            return self._yield_together(weights)
        wrong = self._spoil(weights)
        return wrong if self.fault in ("twice", "nothing") else _NamedWeights(wrong, weights.specs)

    def _yield_together(self, weights: Any) -> Iterator[Any]:
        """Yield each weight after a barrier of all ranks."""
        for name, tensor in weights:
            torch.distributed.barrier(self.ctx.process_group())
            yield name, tensor
        if self.fault == "ends badly":
            self.fault = "waits"
            raise Failure("behind the weights")

    def _spoil(self, weights: Any) -> Iterator[Any]:
        scratch = torch.empty(1 << 18, device=self.ctx.device)
        for number, (name, tensor) in enumerate(weights):
            if self.fault == "scratch":
                tensor = scratch[: tensor.numel()].view_as(tensor).copy_(tensor)
            if self.fault == "nothing":
                return
            if self.fault == "raises" and number == 3:  # A target elsewhere has the first weight by now.
                raise Failure("amid the weights")
            if self.fault == "other kind":
                yield name, tensor.cpu().detach().numpy()
            yield (
                name if self.fault != "other" or number < 2 else f"{name}_",
                (tensor if self.fault != "nan" or number != 2 else tensor / 0),
            )
            if self.fault in ("twice", "again"):
                yield name, tensor
            if self.fault == "writes late" and number == 1:  # Unnoticed, and before the weights are sent.
                tensor.data.neg_()


class Taker(_NetRole):
    """A target of weight syncs."""

    @method(awake=("weights",))
    def load_weights(self, weights: Weights, version: int) -> None:
        if self.gate is not None:
            next(weights)
            pass_gate(self.gate)
        if self.fault == "raises":
            for _ in itertools.islice(weights, 2):
                pass
            raise Failure("amid the weights")
        if self.fault == "waits":
            parameters = dict(self.net.named_parameters(remove_duplicate=False))
            for name, tensor in weights:
                torch.distributed.barrier(self.ctx.process_group())
                parameters.get(name, self.net[0].scale).data.copy_(tensor)
        elif self.fault == "takes nothing":
            pass
        elif self.fault == "leaves":
            next(weights)
        elif self.fault == "skips":
            weights.skip()
        elif self.fault == "writes":
            for _, tensor in weights:
                tensor.add_(1)
        elif self.fault == "writes aside":
            for _, tensor in weights:
                tensor.data.add_(1)
        elif self.fault == "keeps aside":
            for _, tensor in weights:
                self.stored.append(tensor.data[:1])
        elif self.fault == "buffers":
            self.net.load_state_dict(dict(weights))
        elif self.fault == "keeps":
            self.stored = [tensor for _, tensor in weights]
        else:
            colocate.torch.load_weights(self.net, weights)

    @method
    def generate(self) -> int:
        return self.ctx.weights_version


class Checked(Taker):
    """A target that yields the received weights back, changed if a fault is set."""

    def __init__(self, width: int = 8, seed: int = 0, dtype: str = "float32") -> None:
        super().__init__(width, seed)
        self.net.to(getattr(torch, dtype))

    @method(awake=("weights",))
    def load_weights(self, weights: Weights, version: int) -> None:
        bias, scale = self.net[0].bias.data, self.net[0].scale
        before = bias.clone()
        super().load_weights(weights, version)
        if self.fault == "stale":
            bias.copy_(before)
        elif self.fault == "bit":
            self.net[0].weight.data.view(torch.uint8)[5, 3] ^= 1
        elif self.fault == "swaps":
            before.copy_(bias)
            bias.copy_(scale)
            scale.copy_(before)
        elif self.fault == "sign":
            self.net[0].weight.data.neg_()

    @method(awake=("weights",))
    def named_weights(self) -> Any:
        weights = colocate.torch.named_weights(self.net)
        if self.fault == "hides":
            return (item for item in weights if item[0] != "0.bias")
        if self.fault == "adds":
            return itertools.chain(weights, [("2.bias", self.net[0].bias[:4])])
        return weights


class Halves(_NetRole):
    """A tensor-parallel target: each rank has a part of each weight's rows, and yields whole weights back."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.parts = {name: self._own_part(tensor) for name, tensor in self.net.state_dict().items()}

    def _own_part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.detach().chunk(self.ctx.world_size)[self.ctx.rank].clone()

    def load_weights(self, weights: Weights, version: int) -> None:
        for name, tensor in weights:
            if name != "0.bias" or self.fault != "shard":
                self.parts[name].copy_(self._own_part(tensor))

    def named_weights(self) -> Any:
        for name, part in self.parts.items():
            parts = [torch.empty_like(part) for _ in range(self.ctx.world_size)]
            torch.distributed.all_gather(parts, part, group=self.ctx.process_group())
            yield name, torch.cat(parts)


class Swapper(Giver, Taker):
    """Both a source and a target."""


class Sharer(_NetRole):
    """A target that shares the source's tensors."""

    @method
    def generate(self) -> int:
        return self.ctx.weights_version

    @method(shares=True)
    def load_weights(self, weights: Weights, version: int) -> None:
        colocate.torch.load_weights(self.net, weights)
        if self.fault == "raises":
            raise Failure("behind the weights")


class Plain(Role):
    """A source and target whose weights no module has, and whose sync methods compute with its tensors."""

    def __init__(self, value: float = 0.0) -> None:
        self.tensors = {name: torch.full((1 << 18,), value, device=self.ctx.device) for name in ("one", "other")}
        self.net = torch.nn.Linear(8, 8)

    @method
    def look(self) -> list[float]:
        return [float(tensor.mean()) for tensor in self.tensors.values()]

    def named_weights(self) -> Any:
        return iter([(name, tensor / tensor.max()) for name, tensor in self.tensors.items()])

    def load_weights(self, weights: Weights, version: int) -> None:
        for tensor in self.tensors.values():
            tensor.zero_()
        for name, tensor in weights:
            self.tensors[name].add_(tensor)


class Unsaved(Taker):
    """A target that is also a source, without checkpoint methods."""

    save = restore = None  # type: ignore[assignment]

    def named_weights(self) -> Any:
        return colocate.torch.named_weights(self.net)


class Learner(Role):
    """A role that trains by an optimizer and generates rows, as a source or a target."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(2, 2)
        for parameter in self.net.parameters():
            parameter.data.fill_(0.5)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    @method
    def update(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.net(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()

    @method
    def look(self) -> int:
        return self.ctx.weights_version

    @method(dispatch=Scatter("rows"), collect=Concat())
    def generate(self, rows: list[int]) -> list[int]:
        return rows

    @method(rows="row")
    async def play(self, row: int) -> int:
        return row

    @method(awake=("weights",))
    def named_weights(self) -> Any:
        return colocate.torch.named_weights(self.net)

    @method(awake=("weights",))
    def load_weights(self, weights: Weights, version: int) -> None:
        colocate.torch.load_weights(self.net, weights)


def _make_scaled(as_tensor: bool) -> torch.nn.Module:
    """Return a layer with a scale as extra state, as quantised layers have."""

    class Scaled(torch.nn.Linear):
        scale = 1.0

        def get_extra_state(self) -> Any:
            return torch.tensor(self.scale) if as_tensor else {"scale": self.scale}

        def set_extra_state(self, state: Any) -> None:
            self.scale = float(state) if as_tensor else state["scale"]

    layer = Scaled(4, 4)
    for parameter in layer.parameters():  # All ranks get the same values.
        parameter.data.fill_(0.5)
    return layer


class Scaling(Role):
    """A source and target whose module has extra state."""

    def __init__(self, as_tensor: bool = False, left_out: bool = False) -> None:
        self.net, self._left_out = torch.nn.Sequential(_make_scaled(as_tensor)), left_out

    @method(awake=("weights",))
    def named_weights(self) -> Any:
        names = {"0.weight": "0.weight", "0.bias": "0.bias"}.get if self._left_out else None
        return colocate.torch.named_weights(self.net, names)

    @method(awake=("weights",))
    def load_weights(self, weights: Weights, version: int) -> None:
        colocate.torch.load_weights(self.net, weights)


class Declared(Role):
    """A source that declares too little awake memory."""

    def __init__(self) -> None:
        self.tensors = {"one": torch.ones(1 << 18, device=self.ctx.device)}

    @method(awake=("weights",))
    def named_weights(self) -> Any:
        return iter(self.tensors.items())


class Asker(Role):
    """A role that reads a sibling's weights."""

    @method
    def look(self, name: str) -> int:
        return len(list(self.ctx.sibling(name, Taker).net.parameters()))

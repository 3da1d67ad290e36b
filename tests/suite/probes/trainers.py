"""Roles that train a model shared by several ranks, and fail on request."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import colocate
from colocate import Role, method, needs
from colocate.testing.gate import Address, pass_gate
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch
else:
    torch = import_optional("torch")

Kind = Literal["none", "ddp", "ddp in the default group", "fsdp2", "tp", "fsdp1", "ddp in its own group", "own mesh"]
Where = Literal["before", "forward", "backward", "after", "update"]
FEATURES, ROWS, RATE = 8, 8, 0.05
STEPS = 4
EVERYWHERE = -1
"""The value of `failing` that means all ranks."""


def make_model(seed: int = 0) -> torch.nn.Module:
    """Return the same model in each process."""

    class Scaled(torch.nn.Sequential):
        """A module with a parameter beside its parts' parameters."""

        def __init__(self, *parts: torch.nn.Module) -> None:
            super().__init__(*parts)
            self.scale = torch.nn.Parameter(torch.ones(FEATURES))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            for part in (lambda x: x * self.scale, *self):
                input = part(input)
            return input

    torch.manual_seed(seed)
    linear = torch.nn.Linear
    return Scaled(linear(FEATURES, 16), torch.nn.Tanh(), linear(16, FEATURES), torch.nn.Tanh(), linear(FEATURES, 1))


def make_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


def train_alone() -> tuple[list[float], dict[str, Any]]:
    """Return the losses and weights of training in one process."""
    net = make_model()
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        x, y = make_batch(number)
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach().numpy() for name, value in net.named_parameters()}


class Failure(Exception):
    """The error that the trainer raises on request."""


class Trainer(Role):
    """A role with a model over all ranks, and Adam.

    Args:
        kind: How the ranks share the model:
            by DDP, FSDP or tensor parallelism, or not at all.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.net: Any = self._wrapped(make_model().to(self.ctx.device))
        # With tensor parallelism only some parameters are DTensors; Adam on a GPU would group both kinds.
        together = False if self.kind == "tp" else None
        self.optimizer: Any = torch.optim.Adam(self.net.parameters(), lr=RATE, foreach=together)
        self.renewals = 0

    def _wrapped(self, net: Any) -> Any:
        if self.kind == "none":
            return net
        if self.kind.startswith("ddp"):
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(net, process_group=self._group())
        if self.kind == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel

            with warnings.catch_warnings():  # Torch calls this class deprecated.
                warnings.simplefilter("ignore", FutureWarning)
                return FullyShardedDataParallel(net, self.ctx.process_group(), device_id=self.ctx.device)
        mesh = self.ctx.device_mesh() if self.kind != "own mesh" else self._own_mesh()
        if self.kind in ("fsdp2", "own mesh"):
            from torch.distributed.fsdp import fully_shard

            for part in net:
                if list(part.parameters()):
                    fully_shard(part, mesh=mesh)
            return fully_shard(net, mesh=mesh)
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def _group(self) -> Any:
        """Return DDP's process group; None for the default group."""
        if self.kind == "ddp in its own group":
            import torch.distributed as dist

            return dist.new_group()
        return self.ctx.process_group() if self.kind == "ddp" else None

    def _own_mesh(self) -> Any:
        """Return a mesh of all ranks that torch itself makes, in a group beside the default one."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = (1, self.ctx.world_size)
        return init_device_mesh(self.ctx.device.type, shape, mesh_dim_names=("pp", "dp"))["dp"]

    @method
    def step(
        self, number: int, failing: int | None = None, where: Where = "before", gate: Address | None = None
    ) -> float:
        if gate is not None:
            pass_gate(gate)
        fails = failing in (self.ctx.rank, EVERYWHERE)
        self.optimizer.zero_grad()
        x, y = (rows.to(self.ctx.device) for rows in make_batch(number))
        if self.kind != "tp":  # Ranks of tensor parallelism share each row.
            x, y = x[self.ctx.rank :: self.ctx.world_size], y[self.ctx.rank :: self.ctx.world_size]
        if fails and where == "before":
            raise Failure("before the forward pass")
        if fails and where in ("forward", "backward"):
            self._fail_within(x, backward=where == "backward")
        loss = ((self.net(x) - y) ** 2).mean()
        loss.backward()
        if fails and where == "after":
            raise Failure("after the last collective")
        if fails and where == "update":
            first = next(iter(self.net.parameters()))
            first.grad = torch.ones_like(first).to_sparse()  # Adam refuses sparse gradients.
        self.optimizer.step()
        return float(loss.detach())

    @method
    def pause(self, gate: Address) -> None:
        pass_gate(gate)

    def _fail_within(self, x: torch.Tensor, backward: bool) -> None:
        net = self.net.module if self.kind.startswith("ddp") else self.net

        def fail(*_: Any) -> None:
            handle.remove()
            raise Failure("in the backward pass" if backward else "in the forward pass")

        handle = net[1].register_full_backward_hook(fail) if backward else net[1].register_forward_hook(fail)

    def save(self, folder: str) -> None:
        if self.ctx.rank == 0:
            torch.save([self.net.state_dict(), self.optimizer.state_dict()], Path(folder, "trainer.pt"))

    def restore(self, folder: str) -> None:
        net, optimizer = torch.load(Path(folder, "trainer.pt"))
        self.net.load_state_dict(net)
        self.optimizer.load_state_dict(optimizer)

    @method
    def weights(self) -> dict[str, Any]:
        arrays = {}
        for name, value in self.net.named_parameters():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            arrays[name.removeprefix("module.")] = whole.detach().cpu().numpy().copy()
        return arrays

    @method
    def parts(self) -> dict[str, Any]:
        state: dict[str, Any] = self.net.state_dict()
        return state

    @method
    def groups(self) -> list[str]:
        meshes = [value.device_mesh for value in self.net.parameters() if hasattr(value, "device_mesh")]
        return sorted({str(mesh.get_group(0).group_name) for mesh in meshes})

    @method
    def updates(self) -> tuple[int, set[int]]:
        """Return the number of renewals, and the optimizer's counts of updates."""
        return self.renewals, {int(state["step"]) for state in self.optimizer.state.values()}

    @method
    def identities(self) -> list[int]:
        return [id(value) for value in self.net.parameters()]


@needs("process_group")
class Renewing(Trainer):
    """A trainer that renews its model after a failed step."""

    def renew(self) -> None:
        from colocate.torch import renew

        self.renewals += 1
        renew(self.net, self.optimizer, self.ctx)


@needs("process_group")
class Rebuilding(Renewing):
    """A trainer that rebuilds its model after a failed step, if renewing in place fails.

    Args:
        kind: How the ranks share the model.
        device: The device of the rebuilt model; by default the slot's.
        torch_is_known: Whether torch has the parts that renew models in place.
    """

    def __init__(self, kind: Kind, device: str | None = None, torch_is_known: bool = True) -> None:
        self.rebuilt = 0
        self.device, self.torch_is_known = device, torch_is_known
        super().__init__(kind)

    def renew(self) -> None:
        import pytest
        from torch.distributed.device_mesh import DeviceMesh
        from torch.nn.parallel import DistributedDataParallel

        from colocate.torch import renew

        self.renewals += 1
        with pytest.MonkeyPatch.context() as patch:
            if not self.torch_is_known:
                patch.delattr(DeviceMesh, "_get_root_mesh")
                patch.delattr(DistributedDataParallel, "_update_process_group")
            again = partial(self._again, patch)
            self.net = renew(self.net, self.optimizer, self.ctx, rebuild=again)

    def _again(self, patch: Any) -> Any:
        patch.undo()  # torch itself needs the removed parts.
        self.rebuilt += 1
        return self._wrapped(make_model(seed=1).to(self.device or self.ctx.device))

    @method
    def made_anew(self) -> int:
        return self.rebuilt


class WorkerBroken(Trainer):
    """A trainer whose renewal fails."""

    def renew(self) -> None:
        raise colocate.ColocateError("this model can't go on")

"""Roles on tensors: memory, autograd, writes in place, random numbers, collectives. Each needs torch."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import TYPE_CHECKING, Any, cast

from colocate import Concat, First, Gather, OnRank, PerRank, Reduce, Role, Scatter, method, needs
from colocate._role import torch_groups
from colocate.testing.gate import Address, pass_gate, pass_gate_async

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Tensors(Role):
    """Makes tensors, keeps them, writes where it shouldn't."""

    def __init__(self) -> None:
        self.returned: Any = None
        self.given: Any = None

    @method(collect=Concat())
    def make(self, rows: int, fill: float | None = None) -> torch.Tensor:
        """So many rows on each rank, all different unless filled."""
        import torch

        device = self.ctx.device
        made = torch.arange(float(rows), device=device) + 100.0 * self.ctx.rank
        made = made if fill is None else torch.full_like(made, fill)
        self.returned = made
        return made

    @method
    def make_uncollected(self, rows: int) -> list[torch.Tensor]:
        """Rows in a process whose garbage collector doesn't run, until `is_there` is asked with `collects`."""
        import torch

        gc.collect()
        gc.disable()
        made = torch.arange(float(rows), device=self.ctx.device)
        self.weak = weakref.ref(made)
        return [made]

    @method
    def is_there(self, collects: bool = False) -> bool:
        """Whether what `make_uncollected` has made is still there."""
        if collects:
            gc.enable()
        return self.weak() is not None

    @method(dispatch=PerRank("rows"), collect=Concat())
    def make_each(self, rows: int) -> torch.Tensor:
        """As `make`, with a number for each rank."""
        import torch

        return torch.arange(float(rows), device=self.ctx.device) + 100.0 * self.ctx.rank

    @method(dispatch=OnRank(0))
    def make_on_one(self, rows: int) -> torch.Tensor:
        """On one rank."""
        import torch

        return torch.arange(float(rows), device=self.ctx.device)

    @method(dispatch=Scatter("x"), collect=Concat())
    def add(self, x: torch.Tensor, y: float = 1.0) -> torch.Tensor:
        """Row by row."""
        return x + y

    @method(dispatch=Scatter("x"), collect=Gather())
    def seen(self, x: torch.Tensor) -> list[float]:
        """What each rank gets of a scattered tensor."""
        return [float(item) for item in x]

    @method(collect=Gather())
    def whole(self, x: torch.Tensor) -> list[float]:
        """What each rank gets of a tensor for all."""
        return [float(item) for item in x]

    @method(dispatch=Scatter("x", pad=True), collect=Concat())
    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Each row beside how many rows this rank got."""
        import torch

        return torch.stack([x, torch.full_like(x, float(len(x)))], dim=1)

    @method(dispatch=Scatter("x"), collect=Reduce("mean"))
    def mean(self, x: torch.Tensor) -> dict[str, float]:
        """The mean of the rows."""
        return {"mean": float(x.mean())}

    @method(collect=First())
    def echo(self, value: Any) -> Any:
        """Give back what it gets."""
        return value

    @method(collect=Gather())
    def facts(self, x: torch.Tensor) -> dict[str, Any]:
        """What a tensor is like here."""
        return {
            "requires_grad": x.requires_grad,
            "inference": x.is_inference(),
            "device": str(x.device) == str(self.ctx.device),
            "dtype": str(x.dtype),
        }

    @method(collect=Concat())
    def under_inference_mode(self, rows: int) -> torch.Tensor:
        """An inference tensor, as it leaves the method."""
        import torch

        with torch.inference_mode():
            return torch.arange(float(rows), device=self.ctx.device) * 2

    @method(collect=Concat())
    def with_gradient(self, rows: int) -> dict[str, torch.Tensor]:
        """A tensor that hangs on a graph, and a parameter."""
        import torch

        weight = torch.nn.Parameter(torch.arange(float(rows), device=self.ctx.device))
        return {"made": weight * 3, "weight": weight}

    @method(collect=Gather())
    def train_on(self, x: torch.Tensor) -> float:
        """Use a tensor where gradients flow."""
        import torch

        scale = torch.ones((), requires_grad=True, device=x.device)
        (x * scale).sum().backward()  # type: ignore[no-untyped-call]
        assert scale.grad is not None
        return float(scale.grad)

    @method(dispatch=Scatter("x"), collect=Gather())
    def write_into(self, x: torch.Tensor) -> None:
        """What no method may do: change its argument in place."""
        x.add_(1.0)

    @method(dispatch=Scatter("x"), collect=Gather())
    def hold_on_to(self, x: torch.Tensor) -> None:
        """Remember an argument."""
        self.given = x

    @method
    def write_into_what_it_returned(self) -> None:
        """What no method may do either."""
        self.returned.add_(1.0)

    @method
    def write_behind_the_version(self) -> None:
        """A write that torch's version counter doesn't see."""
        self.returned.numpy()[:] = -1.0

    @method
    def write_into_what_was_given(self) -> None:
        """What no method may do, a call later."""
        self.given.add_(1.0)

    @method(dispatch=Scatter("x"), collect=Gather())
    def address_of_rows(self, x: torch.Tensor) -> int:
        """Where each rank's rows lie in memory."""
        return x.untyped_storage().data_ptr()

    @method
    def require_grad(self, tensors: dict[str, torch.Tensor]) -> list[bool]:
        """Which of some tensors require gradients."""
        return [tensor.requires_grad for tensor in tensors.values()]

    @method
    def own_address(self) -> int:
        """Where the tensor lies that it returned last."""
        address: int = self.returned.untyped_storage().data_ptr()
        return address

    @method
    def keep_and_write(self, x: torch.Tensor, on_rank: int) -> list[float]:
        """One rank changes its copy of an argument, to see who notices. Every rank then says what it has."""
        self.given = x
        if self.ctx.rank == on_rank:
            x.zero_()
        return [float(item) for item in x]

    @method
    def still_has(self) -> list[float]:
        """The argument that it was given before."""
        return [float(item) for item in self.given]

    @method(readonly=("x",))
    def sum_readonly(self, x: torch.Tensor) -> float:
        """Only reads its argument."""
        return float(x.sum())

    @method(collect=Concat())
    def random(self, rows: int) -> torch.Tensor:
        """Drawn from the context's generator."""
        import torch

        return torch.rand(rows, generator=self.ctx.generator, device=self.ctx.device)

    @method(collect=Concat())
    def random_but(self, rows: int, failing: int) -> torch.Tensor:
        """The same, and a rank raises after it has drawn."""
        import torch

        drawn = torch.rand(rows, generator=self.ctx.generator, device=self.ctx.device)
        if failing == self.ctx.rank:
            raise ValueError("a bad draw")
        return drawn

    @method(collect=Concat())
    def random_from_start(self, rows: int) -> torch.Tensor:
        """What the context's generator draws first."""
        import torch

        generator = torch.Generator(device=self.ctx.device).manual_seed(self.ctx.generator.initial_seed())
        return torch.rand(rows, generator=generator, device=self.ctx.device)

    @method
    def device(self) -> tuple[str, int]:
        """The device, and torch's number of threads."""
        import torch

        return str(self.ctx.device), torch.get_num_threads()

    @method
    def fail(self, given: object = None) -> None:
        """Raise."""
        raise ValueError("no tensor today")

    @method(collect=Concat())
    def make_or_fail(self, rows: int, failing: int | None) -> torch.Tensor:
        """Rows, except on one rank."""
        import torch

        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} makes nothing")
        return torch.ones(rows, device=self.ctx.device)

    @method(collect=Concat())
    def make_at(self, rows: int, gate: Address) -> torch.Tensor:
        """Wait, then make rows."""
        import torch

        pass_gate(gate)
        return torch.arange(float(rows), device=self.ctx.device) + 100.0 * self.ctx.rank


class Collective(Role):
    """Uses process groups, rightly and wrongly."""

    def __init__(self) -> None:
        self.kept: ProcessGroup | None = None

    @method
    def sum(self, value: float, axis: str | None = None) -> float:
        """The sum over the ranks."""
        return self._sum(value, self.ctx.process_group(axis))

    @method(dispatch=PerRank("value"))
    def sum_each(self, value: float, axis: str | None = None) -> float:
        """The sum over the ranks of a number for each."""
        return self._sum(value, self.ctx.process_group(axis))

    @method
    def sum_without_end(self, elements: int) -> None:
        """Sums over the ranks until somebody has enough of it."""
        import torch
        import torch.distributed as dist

        group, values = self.ctx.process_group(), torch.ones(elements, device=self.ctx.device)
        while True:
            dist.all_reduce(values, group=group)

    @method
    def facts(self, axis: str | None = None) -> tuple[int, int]:
        """Rank and size in the group, as torch tells them."""
        group = self.ctx.process_group(axis)
        return group.rank(), group.size()

    @method
    def same_twice(self) -> bool:
        """Between two holds it is one group."""
        return self.ctx.process_group() is self.ctx.process_group()

    @method
    def in_default(self, asks: bool = True) -> tuple[int, int, list[int]]:
        """This rank and the size of torch's default group, and the ranks there of the role's; zeros without one."""
        import torch.distributed as dist

        group = self.ctx.process_group() if asks else None
        if not dist.is_initialized():
            return 0, 0, []
        return dist.get_rank(), dist.get_world_size(), [] if group is None else dist.get_process_group_ranks(group)

    @method
    def sum_in_default(self) -> float:
        """The sum of the slots' numbers, over torch's default group."""
        return self._sum(float(self.ctx.slot), None)

    @method
    def sum_in_own(self, failing: int | None = None, gate: Address | None = None) -> float:
        """The sum over the slots, in a group that the role makes by torch's own means."""
        import torch.distributed as dist

        if self.kept is None:
            self.kept = cast("ProcessGroup", dist.new_group())
        return self._sum_unless(failing, self.kept, gate)

    @method
    def pass_on(self, failing: int | None = None) -> float:
        """Rank 0 sends to rank 1."""
        import torch
        import torch.distributed as dist

        group, value = self.ctx.process_group(), torch.tensor([float(self.ctx.rank)])
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} left before the transfer")
        if self.ctx.rank == 0:
            dist.send(value, group=group, group_dst=1)
        else:
            dist.recv(value, group=group, group_src=0)
        return float(value)

    @method
    def mesh(self, name: str | None = None) -> dict[str, tuple[int, int]]:
        """The torch mesh: along each axis this rank and the sum of the slots' numbers."""
        mesh = self.ctx.device_mesh(name)
        assert mesh is self.ctx.device_mesh(name)
        axes = mesh.mesh_dim_names or ()
        return {
            axis: (mesh.get_local_rank(axis), round(self._sum(self.ctx.slot, mesh.get_group(axis)))) for axis in axes
        }

    @method
    def sum_unless(self, value: float, failing: int | None) -> float:
        """One rank raises before the collective in which the others wait."""
        group = self.ctx.process_group()
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} left before the collective")
        return self._sum(value, group)

    @method(dispatch=PerRank("gate"))
    def sum_at(self, gate: Address | None, value: float, failing: int) -> float:
        """As `sum_unless`, where each rank first waits at its gate, if it has one."""
        group = self.ctx.process_group()
        if gate is not None:
            pass_gate(gate)
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} left before the collective")
        return self._sum(value, group)

    @method(dispatch=PerRank("gate"))
    def fail_before_group(self, gate: Address | None, failing: int) -> float:
        """One rank raises before it asks for the group that the others are about to make."""
        if gate is not None:
            pass_gate(gate)
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} left before the group was made")
        return self._sum(1.0, self.ctx.process_group())

    @method(dispatch=PerRank("gate"))
    def sum_or_die(self, gate: Address | None, value: float) -> float:
        """Each rank with a gate waits there and dies, while the others wait for it."""
        group = self.ctx.process_group()
        if gate is not None:
            pass_gate(gate)
            os.kill(os.getpid(), signal.SIGKILL)
        return self._sum(value, group)

    @method(dispatch=PerRank("gate"), concurrency=2)
    async def fail_soon(self, gate: Address | None) -> None:
        """A rank with a gate raises there, while other calls run beside this one."""
        if gate is not None:
            await pass_gate_async(gate)
            raise ValueError(f"rank {self.ctx.rank} has failed")

    @method(dispatch=PerRank("gate"), concurrency=2)
    async def sum_soon(self, gate: Address | None) -> float:
        """A rank with a gate asks for the group only then."""
        if gate is not None:
            await pass_gate_async(gate)
        return self._sum(1.0, self.ctx.process_group())

    @method(dispatch=PerRank("dies"))
    def die_while_it_is_made(self, dies: bool) -> None:
        """A rank dies when all are there to make the group."""
        if dies:
            torch_groups.Plan.make = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        self.ctx.process_group()

    @method
    def pass_gate_and_fail(self, gate: Address, fail: bool) -> None:
        """Wait, then perhaps raise, without any group."""
        pass_gate(gate)
        if fail:
            raise ValueError("told to raise")

    @method
    def keep_group(self) -> float:
        """Keep the group for later calls."""
        self.kept = self.ctx.process_group()
        return self._sum(1.0, self.kept)

    @method
    def forget_group(self) -> None:
        """Keep it no longer."""
        self.kept = None

    @method
    def sum_kept(self, failing: int | None = None, gate: Address | None = None) -> float:
        """The sum over the ranks in the group that was kept, in which a role that has no `renew` must not fail."""
        return self._sum_unless(failing, self.kept, gate)

    def _sum_unless(self, failing: int | None, group: ProcessGroup | None, gate: Address | None) -> float:
        """All ranks come to the gate, if there is one: a rank that hasn't begun a failed call never does."""
        if gate is not None:
            pass_gate(gate)
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} left before the collective")
        return self._sum(1.0, group)

    def _sum(self, value: float, group: ProcessGroup | None) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value], device=self.ctx.device)
        dist.all_reduce(tensor, group=group)
        return float(tensor)


class Own(Role):
    """Makes torch's default group itself."""

    @method
    def make(self) -> None:
        """Of this process alone."""
        import torch.distributed as dist

        store = dist.HashStore()  # type: ignore[attr-defined]  # torch has it here without saying so
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


class Launched(Role):
    """What a library finds in its constructor that was written for torchrun."""

    def __init__(self, fails: int | None = None) -> None:
        import torch.distributed as dist

        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        self.found = {name: int(os.environ[name]) for name in names}
        self.by_torch = dist.get_rank(), dist.get_world_size()
        if fails == self.ctx.rank:
            dist.init_process_group("gloo")

    @method
    def facts(self) -> tuple[dict[str, int], tuple[int, int], bool]:
        """The variables, what torch says, and whether they name the rendezvous."""
        named = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return self.found, self.by_torch, named == (self.ctx.rendezvous.host, self.ctx.rendezvous.port)


class Initializing(Role):
    """Makes torch's default group in its constructor, by itself."""

    def __init__(self, by_environment: bool = False) -> None:
        import torch.distributed as dist

        if by_environment:
            dist.init_process_group("gloo")
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]  # torch has it here without saying so
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    @method
    def nothing(self) -> None:
        """A role has a method."""


class Meeting(Role):
    """Uses the rendezvous."""

    def __init__(self) -> None:
        self.found = self.ctx.rendezvous

    @method(dispatch=PerRank("text"))
    def put(self, text: str) -> None:
        """Leave something there."""
        self._store().set(f"text of {self.ctx.rank}", text)

    @method
    def take(self) -> list[str]:
        """What all ranks have left, and where."""
        store = self._store()
        return [store.get(f"text of {rank}").decode() for rank in range(self.ctx.world_size)]

    def _store(self) -> Any:
        import torch.distributed as dist

        return dist.TCPStore(self.found.host, self.found.port, is_master=False)  # type: ignore[attr-defined]


@needs("process_group")
class Together(Collective):
    """Says that it uses process groups."""

"""Workers as verl's users write them."""

import asyncio
import os
import time
from pathlib import Path

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray.base import RayClassWithInitArgs, create_colocated_worker_raw_cls


class Plain(Worker):
    def __init__(self, start: int = 0, fails: bool = False) -> None:
        super().__init__()
        if fails:
            raise ValueError("no such model")
        self.start = start
        self._register_dispatch_collect_info("rows", dp_rank=self.rank, is_collect=self.rank == 0)

    def number(self, more: int = 0) -> int:
        return self.start + self.rank + more

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to_all(self, more: int) -> int:
        return self.number(more)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, more: int) -> int:
        return self.number(more)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def on_first(self, more: int) -> int:
        return self.number(more)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        data.batch["a"] += self.rank
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def add_later(self, data: DataProto) -> DataProto:
        await asyncio.sleep(0)
        data.batch["a"] += 10
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rows"))
    def by_mesh(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> float:
        torch.distributed.init_process_group()
        found = torch.tensor([float(self.rank)])
        torch.distributed.all_reduce(found)
        return found.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raises(self) -> None:
        raise RuntimeError("out of luck")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def beside(self) -> int:
        return self.get_fused_worker_by_name("critic").value


class Critic(Worker):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get(self) -> int:
        return self.value + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def train_mini_batch(self, until: Path) -> None:
        while not until.exists():
            time.sleep(0.05)
        raise ValueError("no gradient")


Fused = create_colocated_worker_raw_cls(
    {"plain": RayClassWithInitArgs(ray.remote(Plain)), "critic": RayClassWithInitArgs(ray.remote(Critic), 7)}
)


@ray.remote
class Hybrid(Fused):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def both(self) -> tuple[int, int]:
        return self.plain.number(), self.critic.get()

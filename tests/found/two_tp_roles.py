"""A failed step of one of two tensor-parallel roles on equal meshes costs the other role nothing.

Modes: processes, ray, dask.
"""

import torch
import torch.distributed as dist
from hx import attempt, connect, end, verdict
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import colocate
from colocate import First, Reduce, Role, method
from colocate.torch import renew


class Split(Role):
    def __init__(self):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        self.net = parallelize_module(net, self.ctx.device_mesh()["tp"], plan)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.renewals = 0

    @method(collect=Reduce("mean"))
    def train(self, x, bad=None):
        loss = self.net(x).square().mean()
        loss.backward()
        if self.ctx.rank == bad:
            raise ValueError("a bad batch")
        dist.barrier(group=self.ctx.process_group("tp"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def renew(self):
        renew(self.net, self.optimizer, self.ctx)

    @method(collect=First())
    def groups(self):
        meshes = [each.device_mesh for each in self.net.parameters() if hasattr(each, "device_mesh")]
        return sorted({mesh.get_group(0).group_name for mesh in meshes})


if __name__ == "__main__":
    spec = colocate.role(Split).on(mesh={"dp": 1, "tp": 2})
    x = torch.ones(8, 4)
    with connect() as runtime, runtime.reserve(slots=2) as pool:
        for bad in ("one", "two"):
            with pool.spawn({"one": spec, "two": spec}, name=f"{bad}-fails") as group:
                on = {name: group.role(name).groups() for name in ("one", "two")}
                verdict("each has a group of its own", on["one"] != on["two"], on)
                error = attempt(group.role(bad).train, x, bad=1)
                verdict(f"{bad} fails", isinstance(error, colocate.RoleError), error)
                for name in ("one", "two"):
                    loss = attempt(group.role(name).train, x)
                    verdict(f"{name} goes on", isinstance(loss, float), loss)
    end()

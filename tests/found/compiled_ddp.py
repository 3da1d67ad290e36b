"""DDP under torch.compile works after a step that failed on one rank, as it does without torch.compile.

Modes: processes, ray, dask.
"""

import torch
from hx import attempt, connect, end, verdict
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import colocate
from colocate import Reduce, Role, Scatter, method
from colocate.torch import renew


class Trainer(Role):
    def __init__(self, compiled):
        torch.manual_seed(0)
        self.net = DistributedDataParallel(nn.Linear(4, 4), process_group=self.ctx.process_group())
        self.run = torch.compile(self.net, backend="eager") if compiled else self.net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def renew(self):
        renew(self.net, self.optimizer, self.ctx)

    @method(dispatch=Scatter("x"), collect=Reduce("mean"))
    def train(self, x, bad=None):
        if self.ctx.rank == bad:
            raise ValueError("bad")
        loss = self.run(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


if __name__ == "__main__":
    x, losses = torch.ones(4, 4), {}
    with connect() as runtime, runtime.reserve(slots=2) as pool:
        for compiled in (False, True):
            with pool.spawn({"t": colocate.role(Trainer, compiled)}, name=f"compiled-{compiled}") as group:
                trainer = group.role("t", Trainer)
                losses[compiled] = [attempt(trainer.train, x)]
                for bad in (1, 0):
                    error = attempt(trainer.train, x, bad)
                    verdict("a rank fails", isinstance(error, colocate.RoleError), error)
                    losses[compiled].append(attempt(trainer.train, x))
    verdict("compiled or not", losses[True] == losses[False], losses)
    end()

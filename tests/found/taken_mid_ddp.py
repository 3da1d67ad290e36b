"""A detached pool that drivers take from each other amid training steps keeps all ranks and their steps.

Modes: dask.
"""

import logging
import random
import tempfile
import time

import torch
from hx import end, verdict
from torch.nn.parallel import DistributedDataParallel as DDP

import colocate
from colocate import Role, method
from colocate.torch import renew

SECONDS = 30.0


class Trainer(Role):
    def __init__(self):
        self.net = DDP(torch.nn.Linear(50, 50), process_group=self.ctx.process_group())
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.n = 0

    def renew(self):
        renew(self.net, self.optimizer, self.ctx)

    @method
    def step(self):
        self.net(torch.randn(4, 50)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.n += 1

    @method
    def steps(self):
        return self.n


def trainer(pool):
    return pool.groups["training"].role("trainer", Trainer)


if __name__ == "__main__":
    import dask
    from distributed import LocalCluster

    pauses = random.Random(0)
    options = {"protocol": "tcp://", "dashboard_address": "127.0.0.1:0", "silence_logs": logging.FATAL}
    with (
        tempfile.TemporaryDirectory() as scratch,
        dask.config.set({"temporary-directory": scratch}),
        LocalCluster(n_workers=2, threads_per_worker=1, **options) as cluster,
    ):
        runtimes = [colocate.connect("dask", address=cluster.scheduler_address) for _ in range(2)]
        pool = runtimes[0].reserve(slots=2, cpus=0, detachable=True)
        pool.spawn({"trainer": colocate.role(Trainer)}, name="training")
        pool.detach("count", ttl=120)
        pool, taken, lost, steps = runtimes[0].attach("count", own=True), 0, None, []
        until = time.time() + SECONDS
        while lost is None and time.time() < until:
            view, taken = trainer(pool), taken + 1
            try:
                view.steps()
                for _ in range(200):
                    view.step.submit()
                time.sleep(pauses.random() * 0.15)
                pool = runtimes[taken % 2].attach("count", own=True)
                steps = trainer(pool).steps.options(timeout=30)()
            except colocate.ColocateError as error:
                lost = error
        verdict("the group outlives each driver", lost is None, (taken, lost))
        verdict("the ranks have done as many steps", len(set(steps)) == 1, steps)
        print(f"taken {taken} times, {steps} steps")
        for each in runtimes:
            each.close()
    end()

"""A job that counts slowly, like hours of training, for tests of its interruption."""

import time
from pathlib import Path

import torch

from colocate import Role, Run, method, needs


@needs("process_group")
class Counter(Role):
    def __init__(self) -> None:
        self.count = torch.zeros(1)

    @method
    def step(self) -> float:
        time.sleep(0.2)
        self.count += 1
        total = self.count.clone()
        torch.distributed.all_reduce(total, group=self.ctx.process_group())
        return float(total)

    def save(self, directory: str) -> None:
        time.sleep(1.0)  # a model's save, too, outlasts two signals
        torch.save(self.count, Path(directory, f"rank-{self.ctx.rank}.pt"))

    def restore(self, directory: str, ranks: int) -> None:
        self.count = torch.load(Path(directory, f"rank-{self.ctx.rank % ranks}.pt"))


def train(run: Run, *, steps: int = 100_000, every: int = 20) -> None:
    counter = run.groups["policy"].role("counter", Counter)
    done = 0 if run.resumed is None else int(run.resumed.name.rpartition("-")[2])
    for step in range(done + 1, steps + 1):
        counts = counter.step()
        assert counts == [step * len(counts)] * len(counts), (counts, step)  # the restored counts equal the saved ones
        run.log(step, count=counts[0])
        if step % every == 0 or run.stopping:
            with run.checkpoint(step) as directory:
                run.groups["policy"].checkpoint(directory / "policy", tag=step)
        if run.stopping:
            break

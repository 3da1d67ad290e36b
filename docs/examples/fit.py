# docs/examples/fit.py
from pathlib import Path

import torch

from colocate import First, Role, Run, method


class Learner(Role):
    """Learns a sine by a small network."""

    def __init__(self, width: int = 32, lr: float = 1e-2) -> None:
        self.net = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
        for parameter in self.net.parameters():
            torch.nn.init.normal_(parameter, std=0.5, generator=self.ctx.generator)
        self.net.to(self.ctx.device)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)

    @method(collect=First())
    def learn(self, rows: int) -> float:
        x = torch.rand(rows, 1, generator=self.ctx.generator).to(self.ctx.device) * 6
        loss = torch.nn.functional.mse_loss(self.net(x), x.sin())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self, directory: str) -> None:
        torch.save(
            {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, Path(directory, "state.pt")
        )

    def restore(self, directory: str) -> None:
        state = torch.load(Path(directory, "state.pt"), map_location=self.ctx.device)
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


def fit(run: Run, *, steps: int = 300, rows: int = 64, every: int = 100) -> None:
    """The job: what `colocate run` calls, also with `--resume` and after a restart."""
    group = run.groups["learners"]
    learner = group.role("learner", Learner)
    done = int(group.wait_ready() or 0)  # the tag of the checkpoint that its roles go on from
    run.total(steps)
    for step in range(done + 1, steps + 1):
        loss = learner.learn(rows)
        if run.is_due(step, every):
            run.log(step, loss=loss)
            with run.checkpoint(step) as directory:
                group.checkpoint(directory / "learners", tag=step)
        if run.stopping:
            break

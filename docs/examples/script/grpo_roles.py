import copy
import os
import signal
from pathlib import Path

import torch
from grpo import SAMPLES, logprobs, loss_of, make_model, rewards, sample

from colocate import Concat, Reduce, Role, Scatter, method, needs


@needs("process_group")
class Actor(Role):
    def __init__(self, lr: float = 3e-3) -> None:
        self.model = make_model()  # the same weights on each rank
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    @method(dispatch=Scatter("prompts"), collect=Concat())
    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(int(torch.randint(2**62, (), generator=self.ctx.generator)))
        return sample(self.model, prompts)

    @method(dispatch=Scatter("seqs", "scores", "reference", rows_of=SAMPLES), collect=Reduce("mean"))
    def update(self, seqs: torch.Tensor, scores: torch.Tensor, reference: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss_of(self.model, seqs, scores, reference).backward()
        for parameter in self.model.parameters():
            torch.distributed.all_reduce(parameter.grad, group=self.ctx.process_group())
            parameter.grad /= self.ctx.world_size
        self.optimizer.step()
        return scores.mean().item()

    @method
    def crash(self, rank: int) -> None:
        if self.ctx.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self, directory: str) -> None:
        if self.ctx.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, Path(directory, "state.pt"))

    def restore(self, directory: str) -> None:
        state = torch.load(Path(directory, "state.pt"))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Reference(Role):
    def __init__(self) -> None:
        self.model = copy.deepcopy(self.ctx.sibling("actor", Actor).model).requires_grad_(False)

    @method(dispatch=Scatter("seqs", rows_of=SAMPLES), collect=Concat())
    def logprobs(self, seqs: torch.Tensor) -> torch.Tensor:
        return logprobs(self.model, seqs)


class Reward(Role):
    @method(dispatch=Scatter("seqs"), collect=Concat())
    def score(self, seqs: torch.Tensor) -> torch.Tensor:
        return rewards(seqs)

"""A transformers model under FSDP2 on two slots: `python docs/examples/fsdp2.py [ray|dask]`. Nothing is downloaded."""

import sys

import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import colocate
from colocate import Reduce, Role, Scatter, method
from colocate.torch import renew

TINY = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@colocate.needs("process_group")
class Actor(Role):
    def __init__(self, lr: float = 3e-3) -> None:
        torch.manual_seed(0)  # the same weights on each rank, which keeps its shards of them
        self.net = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, **TINY))
        mesh = self.ctx.device_mesh()
        for layer in self.net.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr)

    @method(dispatch=Scatter("tokens"), collect=Reduce("mean"))
    def train(self, tokens: torch.Tensor, fail: bool = False) -> float:
        loss = self.net(input_ids=tokens, labels=tokens).loss
        if fail and self.ctx.rank == 1:
            raise ValueError("a bad batch")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def renew(self) -> None:  # on all ranks, after a failure in the middle of a step
        renew(self.net, self.optimizer, self.ctx)


if __name__ == "__main__":
    executor = sys.argv[1] if len(sys.argv) > 1 else "local"
    options = {"processes": True} if executor == "local" else {"cpus": 2}
    tokens = torch.arange(64).reshape(8, 8) % 32  # each row counts
    with colocate.connect(executor, **options) as runtime, runtime.reserve(slots=2) as pool:
        actor = pool.spawn({"actor": colocate.role(Actor)}).role("actor", Actor)
        for step in range(30):
            try:
                loss = actor.train(tokens, fail=step == 10)
            except colocate.RoleError as error:
                print(f"step {step} failed on rank {error.rank}: {error.__cause__}")
                loss = actor.train(tokens)
            if step % 10 == 9 or step == 0:
                print(f"step {step}: loss {loss:.3f}")

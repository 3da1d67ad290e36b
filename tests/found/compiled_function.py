"""A function under torch.compile that a role calls travels from the script, and is compiled in the worker.

Modes: processes, ray, dask.
"""

import torch
from hx import connect, end, verdict

import colocate
from colocate import First, Role, method


@torch.compile(backend="eager")
def logprobs(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


class Actor(Role):
    @method(collect=First())
    def score(self):
        found = logprobs(torch.ones(2, 3), torch.tensor([0, 1]))
        return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        got, graphs = pool.spawn({"a": colocate.role(Actor)}).role("a", Actor).score()
        verdict("the same numbers", torch.equal(got, logprobs(torch.ones(2, 3), torch.tensor([0, 1]))), got)
        verdict("compiled there", graphs == 1, graphs)
    end()

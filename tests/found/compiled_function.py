"""A function of the script under torch.compile, called by a role: the error says that it is torch.compile.

Modes: processes, ray, dask.
"""

import torch
from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, method


@torch.compile(backend="eager")
def logprobs(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


class Actor(Role):
    @method(collect=First())
    def score(self):
        return logprobs(torch.ones(2, 3), torch.tensor([0, 1]))


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        got = attempt(pool.spawn, {"a": colocate.role(Actor)})
        verdict("says torch.compile", "torch.compile" in str(got) and "inside the role" in str(got), got)
    end()

"""A reference turns inference mode and autocast on for good, in its constructor: the actor beside it trains.

Modes: threads, strict, processes, ray, dask.
"""

import torch
from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, method


class Reference(Role):
    def __init__(self):
        self.blocks = [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)]
        for block in self.blocks:
            block.__enter__()

    @method(collect=First())
    def is_on(self):
        return torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")


class Actor(Role):
    def __init__(self):
        self.net = torch.nn.Linear(2, 1)

    @method(collect=First())
    def step(self):
        loss = self.net(torch.ones(1, 2)).sum()
        loss.backward()
        return str(loss.dtype)


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        group = pool.spawn({"ref": colocate.role(Reference), "actor": colocate.role(Actor)})
        for _ in range(2):
            on = attempt(group.role("ref", Reference).is_on)
            verdict("it is on in its own methods", on is True, on)
            got = attempt(group.role("actor", Actor).step)
            verdict("the actor trains beside it", got == "torch.float32", got)
    end()

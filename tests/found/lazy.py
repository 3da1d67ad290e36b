"""A model with lazy layers travels as such, and is trained by an optimizer made before its first input.

Modes: threads, strict, processes, ray, dask.
"""

import torch
from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, method


class Holder(Role):
    def __init__(self, net):
        self.net = net

    @method(collect=First())
    def shape(self, x):
        return tuple(self.net(x).shape)

    @method(collect=First())
    def train(self, net, opt):
        net(torch.ones(2, 5)).sum().backward()
        before = net[0].bias.detach().clone()
        opt.step()
        return type(net[0]).__name__, torch.equal(before, net[0].bias)

    @method(collect=First())
    def make(self):
        return torch.nn.LazyBatchNorm1d(dtype=torch.float64)


def main():
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
        holds = pool.spawn({"h": colocate.role(Holder, lazy)}).role("h", Holder)
        got = attempt(holds.shape, torch.ones(2, 5))
        verdict("a constructor's", got == (2, 3), got)
        lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
        got = attempt(holds.train, lazy, torch.optim.SGD(lazy.parameters(), lr=1.0))
        verdict("an argument, with its optimizer", got == ("Linear", False), got)
        got = attempt(lambda: holds.make()(torch.ones(2, 5, dtype=torch.float64)).dtype)
        verdict("a result", got is torch.float64, got)
    end()


if __name__ == "__main__":
    main()

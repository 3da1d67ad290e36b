"""A model and its optimizer travel together: a step of one changes the other, wherever they arrive.

Where one is an argument and the other a global of the script, which would travel apart, that is said.

Modes: threads, strict, processes, ray, dask.
"""

import torch
from hx import attempt, connect, end, mode, verdict

import colocate
from colocate import First, Role, method

NET = torch.nn.Linear(2, 2)
OPT = torch.optim.SGD(NET.parameters(), lr=1.0)


def changes(net, opt):
    before = net.weight.detach().clone()
    opt.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    opt.step()
    return not torch.equal(before, net.weight)


class Trainer(Role):
    def __init__(self, net, opt):
        self.net, self.opt = net, opt

    @method(collect=First())
    def step(self):
        return changes(self.net, self.opt)

    @method(collect=First())
    def step_with(self, net, opt):
        return changes(net, opt() if callable(opt) else opt)

    @method(collect=First())
    def step_by(self, net, scheduler):
        return changes(net, scheduler.optimizer)

    @method(collect=First())
    def learn(self, log_alpha, opt):
        log_alpha.sum().backward()
        opt.step()
        return log_alpha.tolist()

    @method(collect=First())
    def give(self):
        return self.net, self.opt


def told(got):
    """Whether it is what strict mode says of a step of parameters that are an argument by themselves."""
    return mode() == "strict" and "changed its argument" in str(got)


def step_global(ctx):
    return changes(NET, OPT)


def train_global(ctx, opt):
    return changes(NET, opt)


def train_by_global(ctx, net):
    return changes(net, OPT)


def main():
    net = torch.nn.Linear(2, 2)
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=1.0)
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        group = pool.spawn({"t": colocate.role(Trainer, net, opt)})
        trainer = group.role("t", Trainer)

        def good(what, work, *args):
            got = attempt(work, *args)
            verdict(what, got is True or got == [True] or told(got), got)

        good("a constructor's", trainer.step)
        good("a call's", trainer.step_with, net, opt)
        good("a scheduler's", trainer.step_by, net, torch.optim.lr_scheduler.StepLR(opt, 1))
        good("a closure's", trainer.step_with, net, lambda: opt)
        good("a list of parameters", group.run, lambda ctx, it: changes(net, torch.optim.SGD(it, lr=1.0)), params)
        good("a function's", group.run, lambda ctx: changes(net, opt))
        good("a result's", lambda: changes(*trainer.give()))
        with trainer.give.keep() as kept:
            good("a resident's", lambda: changes(*kept.fetch()))

        def one(what, work, *args):
            got = attempt(work, *args)
            verdict(what, got is True or got == [True] or "is the same parameter as" in str(got), got)

        one("a global model, its optimizer an argument", group.run, train_global, OPT)
        one("a global optimizer, its model an argument", group.run, train_by_global, NET)
        one("a global optimizer that an argument names", trainer.step_with, NET, lambda: OPT)
        good("globals both", group.run, step_global)
        one("a global model that has been sent", group.run, train_global, OPT)
        log_alpha = torch.zeros(1, requires_grad=True)
        got = attempt(trainer.learn, log_alpha, torch.optim.SGD([log_alpha], lr=1.0))
        verdict("a tensor's", got == [-1.0] or told(got), got)
    end()


if __name__ == "__main__":
    main()

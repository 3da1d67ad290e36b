"""A role that outgrew its budget, beside one with 64 KiB that can't sleep: it can be called, shrunk and saved again.

Modes: processes, ray, dask.
"""

import tempfile

import torch
from hx import attempt, connect, end, verdict

import colocate
from colocate import MemoryBudgetError, Role, method


class Grows(Role):
    def __init__(self):
        self.weights = torch.zeros(1 << 20)  # 4 MiB
        self.more = []

    @method
    def grow(self):
        self.more.append(torch.ones(3 << 20))  # 12 MiB

    @method
    def shrink(self):
        self.more.clear()

    @method
    def save(self, folder):
        torch.save(self.weights, f"{folder}/weights-{self.ctx.rank}.pt")

    @method
    def restore(self, folder):
        self.weights = torch.load(f"{folder}/weights-{self.ctx.rank}.pt")


class Beside(Role):
    def __init__(self, shared):
        self.values = torch.zeros(16384)
        if shared:
            self.values.share_memory_()

    @method
    def use(self):
        return float(self.values.sum())


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool, tempfile.TemporaryDirectory() as folder:
        for shared in (False, True):
            what = "beside memory that can't sleep" if shared else "beside memory that sleeps"
            roles = {"grows": colocate.role(Grows), "beside": colocate.role(Beside, shared)}
            with pool.spawn(roles, residency="swap", device_memory="8MiB") as group:
                grows, beside = group.role("grows", Grows), group.role("beside", Beside)
                grown = attempt(grows.grow)
                verdict(f"it is told that it outgrew its budget, {what}", isinstance(grown, MemoryBudgetError), grown)
                used = attempt(beside.use)
                verdict(f"the other one works, {what}", used == [0.0], used)
                saved = attempt(group.checkpoint, f"{folder}/{shared}")
                verdict(f"it is saved, {what}", not isinstance(saved, Exception), saved)
                shrunk = attempt(grows.shrink)
                verdict(f"it shrinks, {what}", shrunk == [None], shrunk)
                both = attempt(beside.use), attempt(grows.shrink)
                verdict(f"both go on, {what}", both == ([0.0], [None]), both)
    end()

"""No sync is refused because stacks (of late calls) or memory are inspected meanwhile.

Modes: threads, strict, processes, ray, dask.
"""

import threading
import time
from collections import Counter

import torch
from hx import attempt, connect, end, verdict

import colocate
from colocate import Role, method


def net():
    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(10)])


class Actor(Role):
    def __init__(self):
        self.net = net()

    def named_weights(self):
        for name, parameter in self.net.named_parameters():
            yield name, parameter + 0

    @method
    def nothing(self): ...


class Rollout(Role):
    def __init__(self):
        self.net = net()

    def load_weights(self, weights, version):
        self.staged = dict(weights)
        self.net.load_state_dict(self.staged)
        del self.staged

    @method
    def nothing(self): ...


class Judge(Role):
    @method
    def nap(self, seconds):
        time.sleep(seconds)


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        judge = colocate.role(Judge).on(background=True)
        group = pool.spawn({"actor": colocate.role(Actor), "rollout": colocate.role(Rollout), "judge": judge})
        until = time.time() + 10

        def look():
            while time.time() < until:
                attempt(group.role("judge").nap.options(timeout=0.001), 0.002)
                group.memory()

        looks = threading.Thread(target=look)
        looks.start()
        told = Counter()
        while time.time() < until:
            told[str(attempt(colocate.sync_weights, group.role("actor"), group.role("rollout")))[:60]] += 1
        looks.join()
    refused = {words: count for words, count in told.items() if "keeps" in words}
    verdict("no sync is refused", not refused, refused)
    end()

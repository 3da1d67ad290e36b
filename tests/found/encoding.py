"""A tokenizer's batch is scattered and joined as its own type, and so are other mappings.

Modes: threads, processes, ray, dask.
"""

from collections import UserDict
from collections.abc import Mapping

import torch
import transformers
from hx import attempt, connect, end, verdict

import colocate
from colocate import Concat, Gather, Reduce, Role, Scatter, method


class Frozen(Mapping):
    def __init__(self, items):
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class Actor(Role):
    @method(dispatch=Scatter("batch"), collect=Gather())
    def rows(self, batch):
        return type(batch).__name__, len(batch["input_ids"])

    @method(dispatch=Scatter("batch"), collect=Concat())
    def same(self, batch):
        return batch

    @method(dispatch=Scatter("batch"), collect=Reduce("sum"))
    def count(self, batch):
        return type(batch)({"rows": len(batch["input_ids"])})


def main():
    items = {"input_ids": torch.arange(12).view(4, 3), "attention_mask": torch.ones(4, 3)}
    with connect() as runtime, runtime.reserve(slots=2) as pool:
        actor = pool.spawn({"a": colocate.role(Actor)}).role("a", Actor)
        for kind in (transformers.BatchEncoding, transformers.BatchFeature, UserDict, Frozen, dict):
            name, batch = kind.__name__, kind(items)
            got = attempt(actor.rows, batch)
            verdict(f"{name}: two rows each", got == [(name, 2)] * 2, got)
            got = attempt(actor.same, batch)
            verdict(f"{name}: joined", type(got) is kind and torch.equal(got["input_ids"], items["input_ids"]), got)
            with actor.same.keep(batch) as kept:
                got = attempt(actor.rows, kept.ref)
                verdict(f"{name}: kept", got == [(name, 2)] * 2, got)
            got = attempt(actor.count, batch)
            verdict(f"{name}: counted", type(got) is kind and got["rows"] == 4, got)
    end()


if __name__ == "__main__":
    main()

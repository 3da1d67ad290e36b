"""A returned DTensor is refused: the error names its path, and says what to return instead.

Modes: processes, ray, dask.
"""

import torch
from hx import attempt, connect, end, verdict
from torch.distributed.tensor import Shard, distribute_tensor

import colocate
from colocate import First, Role, method


class Holder(Role):
    def __init__(self):
        self.x = distribute_tensor(torch.arange(4.0), self.ctx.device_mesh(), [Shard(0)])

    @method(collect=First())
    def plain(self):
        return self.x

    @method
    def nested(self):
        return {"weights": [self.x]}

    @method(collect=First())
    def whole(self):
        return self.x.full_tensor()

    @method
    def part(self):
        return self.x.to_local()


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=2) as pool:
        holds = pool.spawn({"h": colocate.role(Holder)}).role("h", Holder)
        for what, path in ((holds.plain, "result"), (holds.nested, "result['weights'][0]")):
            error = attempt(what)
            verdict("it is refused", isinstance(error, colocate.SerializationError), error)
            verdict("with its path", path in str(error), error)
            verdict("and what to do", ".full_tensor()" in str(error) and ".to_local()" in str(error), error)
        verdict("the whole arrives", attempt(holds.whole).tolist() == [0, 1, 2, 3])
        verdict("so do parts", [each.tolist() for each in attempt(holds.part)] == [[0, 1], [2, 3]])
    end()

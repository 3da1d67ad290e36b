"""After a failed call under TORCH_DISTRIBUTED_DEBUG=DETAIL, the next call works.

Modes: processes, ray, dask.
"""

import torch
from hx import attempt, connect, end, verdict

import colocate
from colocate import Role, method


class Reduces(Role):
    @method
    def go(self, bad=None):
        if self.ctx.rank == bad:
            raise ValueError("bad")
        x = torch.ones(1)
        torch.distributed.all_reduce(x, group=self.ctx.process_group())
        return float(x)


if __name__ == "__main__":
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    with connect() as runtime, runtime.reserve(slots=2, env=env) as pool:
        reduces = pool.spawn({"r": colocate.role(Reduces)}).role("r", Reduces)
        for bad in (None, 1, 0):
            if bad is not None:
                error = attempt(reduces.go, bad)
                verdict("a rank fails", isinstance(error, colocate.RoleError), error)
            got = attempt(reduces.go)
            verdict("the next call works", got == [2.0, 2.0], got)
    end()

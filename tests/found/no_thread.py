"""ctx.process_group() while a process can start no thread is that call's error: the next one works.

So it is with a spawn, where the driver can't, and with a look at a worker's memory.

Modes: processes, ray, dask.
"""

import resource

import torch
from hx import attempt, connect, end, verdict
from tests.suite.probes.starved import without_threads

import colocate
from colocate import PerRank, Role, method


def size():
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmSize"))


class Reduces(Role):
    @method(dispatch=PerRank("on"))
    def limit(self, on):
        most = size() + (1 << 20) if on else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    @method
    def lack(self, dies):
        self.lacking = without_threads(dies)
        self.lacking.__enter__()

    @method
    def recover(self):
        self.lacking.__exit__(None, None, None)

    @method
    def go(self, axis=None):
        x = torch.ones(1)
        torch.distributed.all_reduce(x, group=self.ctx.process_group(axis))
        return x.item()


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=2) as pool:
        for ranks in ([True, False], [False, True], [True, True]):
            for before in (False, True):  # others have been made already
                spec = colocate.role(Reduces).on(mesh={"dp": 2})
                with pool.spawn({"r": spec}, name=f"g{before:d}{ranks[0]:d}{ranks[1]:d}") as group:
                    role = group.role("r", Reduces)
                    if before:
                        role.go("dp")
                    role.limit(ranks)
                    error = attempt(role.go)
                    told = isinstance(error, colocate.RoleError)
                    verdict("it is told", told or before, error)  # stacks of threads that have ended may do
                    role.limit([False, False])
                    for _ in range(2):
                        got = attempt(role.go.options(timeout=20))
                        verdict("the next one works", got == [2.0, 2.0], got)
                    verdict("the group goes on", group.state == "ready", group.state)
        for dies in (False, True):  # as it begins, for lack of memory
            with without_threads(dies):
                error = attempt(pool.spawn, {"r": colocate.role(Reduces)})
            verdict("a spawn is told", "can't start new thread" in str(error), error)
            with pool.spawn({"r": colocate.role(Reduces)}) as group:
                role = group.role("r", Reduces)
                role.lack(dies)
                error = attempt(group.memory)
                verdict("a look is told", "can't start new thread" in str(error), error)
                got = attempt(role.recover)
                verdict("the worker goes on", got == [None, None], got)
                got = attempt(group.memory)
                verdict("it can be looked at", isinstance(got, colocate.GroupMemory) and len(got.slots) == 2, got)
    end()

"""A role's asyncio connection outlives a cut of its process group, even if gloo began at the same moment.

Modes: processes, ray, dask.
"""

import asyncio

import torch
import torch.distributed as dist
from hx import attempt, connect, end, verdict

import colocate
from colocate import Role, method


async def echo(reader, writer):
    writer.write(await reader.read(4))


class Served(Role):
    def __init__(self):
        gloo = dist.ProcessGroupGloo

        def connecting(make):
            def make_and_connect(**where):
                made, self.loop = make(**where), asyncio.new_event_loop()
                self.reader, self.writer = self.loop.run_until_complete(self.begin())
                return made

            return make_and_connect

        for name in ("create_device", "create_default_device"):
            setattr(gloo, name, connecting(getattr(gloo, name)))

    async def begin(self):
        self.server = await asyncio.start_server(echo, "127.0.0.1", 0)
        return await asyncio.open_connection(*self.server.sockets[0].getsockname())

    @method
    def reduce(self, bad=None):
        x = torch.ones(1)
        self.ctx.process_group()
        if self.ctx.rank == bad:
            raise ValueError("bad")
        dist.all_reduce(x)  # creates the first group, by which gloo begins
        return x.item()

    @method
    def ask(self):
        async def answer():
            self.writer.write(b"here")
            return await asyncio.wait_for(self.reader.read(4), 30)

        return self.loop.run_until_complete(answer())


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=2) as pool:
        served = pool.spawn({"s": colocate.role(Served)}).role("s", Served)
        got = attempt(served.reduce)
        verdict("there is a group", got == [2.0, 2.0], got)
        error = attempt(served.reduce, 1)
        verdict("a rank fails", isinstance(error, colocate.RoleError), error)
        got = attempt(served.ask)
        verdict("the connection is whole", got == [b"here"] * 2, got)
        got = attempt(served.reduce)
        verdict("the next call works", got == [2.0, 2.0], got)
    end()

"""Sync role code has an event loop, as many libraries expect, and it is the loop of the constructor's futures.

After a role has closed that loop, role code gets another one.

Modes: threads, strict, processes, ray, dask.
"""

import asyncio

from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, method


async def answer():
    return 42


class Rollout(Role):
    def __init__(self):
        self.ready = asyncio.get_event_loop().create_future()

    @method(collect=First())
    def generate(self):
        return asyncio.get_event_loop().run_until_complete(answer())

    @method(collect=First())
    async def serve(self):
        asyncio.get_running_loop().call_soon(self.ready.set_result, 42)
        return await self.ready

    @method(collect=First())
    def closes(self):
        asyncio.get_event_loop().close()

    @method(collect=First())
    async def awaits(self):
        await asyncio.sleep(0)
        return await answer()


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        rollout = pool.spawn({"r": colocate.role(Rollout)}).role("r", Rollout)
        got = attempt(rollout.generate)
        verdict("a sync method has a loop", got == 42, got)
        got = attempt(rollout.serve)
        verdict("an async method runs in that of the constructor", got == 42, got)
        rollout.closes()
        got = attempt(rollout.awaits), attempt(rollout.generate)
        verdict("there is one when a role has closed it", got == (42, 42), got)
    end()

"""asyncio.wait over calls returns or raises TypeError at once, and over futures of calls it returns.

Modes: threads, processes, ray, dask.
"""

import asyncio

from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, method


class Echo(Role):
    @method(collect=First())
    def echo(self, x):
        return x


async def wait(echo):
    done, pending = await asyncio.wait([echo.echo.submit(1)])
    return len(done), len(pending)


async def wait_for_futures(echo):
    done, pending = await asyncio.wait([asyncio.ensure_future(echo.echo.submit(1))])
    return len(done), len(pending)


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        echo = pool.spawn({"e": colocate.role(Echo)}).role("e", Echo)
        got = attempt(asyncio.run, asyncio.wait_for(wait(echo), 30))
        verdict("calls are waited for, or refused at once", got == (1, 0) or type(got) is TypeError, got)
        got = attempt(asyncio.run, asyncio.wait_for(wait_for_futures(echo), 30))
        verdict("futures of calls are waited for", got == (1, 0), got)
    end()

"""The children of all ranks die while rows run, at whatever moment: each call ends, and what comes behind it runs.

Modes: threads, processes, ray, dask.
"""

import asyncio
import os
import random
import threading
import time

from hx import attempt, connect, end, verdict

import colocate
from colocate import Role, method


def wait(connection):
    connection.recv()


class Env(Role):
    def __init__(self):
        self.child = self.ctx.start(wait)

    @method(revives=True)
    def renew_child(self):
        self.child.stop(0)
        self.child = self.ctx.start(wait)

    @method
    def pids(self):
        return self.child.pid

    @method(rows="row", concurrency=4)
    async def play(self, row):
        await asyncio.sleep(0.002)
        return row


def kill(pids, after_s):
    time.sleep(after_s)
    for pid in pids:
        os.kill(pid, 9)


draw = random.Random(3)
with connect() as runtime, runtime.reserve(slots=2) as pool:
    env = pool.spawn({"env": colocate.role(Env)}, name="group").role("env", Env)
    for trial in range(40):
        killer = threading.Thread(target=kill, args=(env.pids(), draw.uniform(0, 0.06)))
        killer.start()
        call = attempt(env.play.options(on_error="return", retry=trial % 2).submit, list(range(60)))
        ended = call if isinstance(call, Exception) else attempt(call.result, 15)
        killer.join()
        if isinstance(ended, TimeoutError):
            break
        env.renew_child.options(timeout=20)()
    verdict("each call ends", not isinstance(ended, TimeoutError), ended)
end()

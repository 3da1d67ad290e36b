"""A process that a role starts and terminates at once: all of them end, and so does a pool at the end of its block.

Modes: processes, ray, dask.
"""

import multiprocessing
import time

from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, method


class Sandbox(Role):
    @method(collect=First())
    def lost(self, times):
        lost = 0
        for _ in range(times):
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            process.start()
            process.terminate()
            process.join(10)
            if process.is_alive():
                lost += 1
                process.kill()
                process.join()
        return lost

    @method(collect=First())
    def pool(self):
        with multiprocessing.get_context("fork").Pool(4) as pool:
            return pool.map(abs, [-1, 1])


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        sandbox = pool.spawn({"s": colocate.role(Sandbox)}).role("s", Sandbox)
        got = attempt(sandbox.lost, 10)
        verdict("all of them end", got == 0, got)
        got = attempt(sandbox.pool.submit().result, 30)
        verdict("the pool ends", got == [1, 1], got)
    end()

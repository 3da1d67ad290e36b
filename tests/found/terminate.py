"""Processes that a role starts and terminates at once all end, and so does a process pool at the end of its block.

A spawned process pool lacks the script's functions: the call fails, and starts no processes for ever.

Modes: processes, ray, dask.
"""

import multiprocessing
import time

from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, method


def double(number):
    return 2 * number


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

    @method(collect=First())
    def pooled(self, how):
        with multiprocessing.get_context(how).Pool(1) as pool:
            return pool.map(double, [1])


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        sandbox = pool.spawn({"s": colocate.role(Sandbox)}).role("s", Sandbox)
        got = attempt(sandbox.lost, 10)
        verdict("all of them end", got == 0, got)
        got = attempt(sandbox.pool.submit().result, 30)
        verdict("the pool ends", got == [1, 1], got)
        got = attempt(sandbox.pooled.submit("fork").result, 30)
        verdict("a forked pool has what the script defines", got == [2], got)
        got = attempt(sandbox.pooled.submit("spawn").result, 60)
        verdict("a spawned one says that it hasn't", "'double' is defined in the driver's script" in str(got), got)
    end()

"""A child that role code forks ends by sys.exit, an exception, or its return; it never continues as the worker.

Modes: threads, processes, ray, dask.
"""

import os
import sys
import time

from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, method


class Forks(Role):
    @method(collect=First())
    def go(self, how):
        pid = os.fork()
        if pid == 0:
            if how == "exit":
                sys.exit(5)
            if how == "raise":
                raise ValueError("in the fork")
            return "the child has returned"
        end = time.time() + 60
        while time.time() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return "the child goes on"


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        forks = pool.spawn({"f": colocate.role(Forks)}).role("f", Forks)
        for how, code in (("exit", 5), ("raise", 1), ("return", 0)):
            got = attempt(forks.go, how)
            verdict(f"it ends with {code}", got == code, got)
    end()

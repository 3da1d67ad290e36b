"""A reward that limits its own time by SIGALRM: "late" in a worker process, as in a script.

One that is late only when its call has ended is told, and fails no other call.

Modes: processes, ray, dask.
"""

import io
import signal
import sys
import time

from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, method


class Late(Exception):
    pass


def late(number, frame):
    raise Late


class Reward(Role):
    @method(collect=First())
    def score(self):
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            end = time.time() + 20
            while time.time() < end:
                pass
        except Late:
            return "late"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    @method(collect=First())
    def forgets(self):
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.2)


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        reward = pool.spawn({"r": colocate.role(Reward)}).role("r", Reward)
        got = attempt(reward.score)
        verdict("the reward is late", got == "late", got)
        shown, sys.stderr = sys.stderr, io.StringIO()
        reward.forgets()
        until = time.time() + 20
        while "raised between two calls" not in sys.stderr.getvalue() and time.time() < until:
            time.sleep(0.05)
        told, sys.stderr = sys.stderr.getvalue(), shown
        verdict("what is raised between two calls is told", "SIGALRM" in told and "in late" in told, told)
        got = attempt(reward.score)
        verdict("the next call is as ever", got == "late", got)
    end()

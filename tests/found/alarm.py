"""A reward that limits its own time by SIGALRM: "late" in a worker process, as in a script.

Modes: processes, ray, dask.
"""

import signal
import time

from hx import connect, end, verdict

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


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        got = pool.spawn({"r": colocate.role(Reward)}).role("r", Reward).score()
    verdict("the reward is late", got == "late", got)
    end()

"""Two drivers take a detached pool from each other all the time: who loses it while it attaches can attach it again.

Modes: dask.
"""

import logging
import os
import random
import subprocess
import sys
import tempfile
import time

from hx import attempt, end, verdict

import colocate
from colocate import Role, method

SECONDS = 20.0


class Counting(Role):
    def __init__(self):
        self.n = 0

    @method
    def add(self, k=1):
        self.n += k
        return self.n


def takes(address, seed):
    """Be one of the drivers; whether it could attach the pool as long as the other did."""
    pauses, attached = random.Random(seed), 0
    with colocate.connect("dask", address=address) as runtime:
        until = time.time() + SECONDS
        while time.time() < until:
            try:
                pool = runtime.attach("count", own=True)
                attached += 1
                time.sleep(pauses.random() * 0.03)
                pool.detach("count", ttl=60)
            except colocate.ConfigError as error:
                print(f"driver {seed}: {error}", flush=True)
                return False
            except colocate.ColocateError:  # the other one has it
                pass
    return attached > 0


if __name__ == "__main__" and len(sys.argv) > 2:
    sys.exit(not takes(sys.argv[2], int(sys.argv[3])))
elif __name__ == "__main__":
    import dask
    from distributed import LocalCluster

    options = {"protocol": "tcp://", "dashboard_address": "127.0.0.1:0", "silence_logs": logging.FATAL}
    with (
        tempfile.TemporaryDirectory() as scratch,
        dask.config.set({"temporary-directory": scratch}),
        LocalCluster(n_workers=2, threads_per_worker=1, **options) as cluster,
    ):
        address = cluster.scheduler_address
        with colocate.connect("dask", address=address) as runtime:
            pool = runtime.reserve(slots=2, cpus=0, detachable=True)
            pool.spawn({"c": colocate.role(Counting)}, name="counting").role("c", Counting).add(3)
            pool.detach("count", ttl=120)
            drivers = [
                subprocess.Popen([sys.executable, os.path.abspath(__file__), "dask", address, str(seed)])
                for seed in "12"
            ]
            codes = [driver.wait() for driver in drivers]
            verdict("both drivers can attach the pool to the end", codes == [0, 0], codes)
            pool = runtime.attach("count", own=True)
            got = attempt(pool.groups["counting"].role("c", Counting).add, 0)
            verdict("the pool has its state", got == [3, 3], got)
            pool.close()
    end()

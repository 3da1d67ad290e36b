"""A rank that dies amid a collective, and is reported late, fails the call by its death, not by a lost connection.

Modes: processes.
"""

import os
import signal
import time

import psutil
from hx import attempt, connect, end, verdict

import colocate
from colocate import Role, WorkerDied, method


class Net(Role):
    @method
    def pid(self):
        return os.getpid()

    @method
    def add(self, late):
        import torch

        time.sleep(late * self.ctx.rank)
        total = torch.ones(1)
        torch.distributed.all_reduce(total, group=self.ctx.process_group())
        return float(total)


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=2) as pool:
        net = pool.spawn({"net": colocate.role(Net)}).role("net", Net)
        net.add(0)
        pid = net.pid()[1]
        supervisor = psutil.Process(pid).ppid()  # reports the exit after all the worker's resources are gone
        call = net.add.submit(3600)
        os.kill(supervisor, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        got = attempt(call.result, 60)
        verdict("the death is told", isinstance(got, WorkerDied) and got.rank == 1, repr(got))
        verdict("the role isn't said to have closed its connection", "os.close" not in str(got), str(got))
    end()

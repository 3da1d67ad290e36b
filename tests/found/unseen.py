"""Updates are submitted, and nobody asks for their results: that they fail is told, and that they never run, on stderr.

Modes: threads, strict, processes, ray, dask.
"""

import subprocess
import sys

from hx import connect, end, mode, verdict

import colocate
from colocate import First, Role, method


class Trainer(Role):
    @method
    def update(self):
        raise ValueError("the update went wrong")

    @method(collect=First())
    def step(self):
        return 42


if __name__ == "__main__":
    if "inner" in sys.argv:
        with connect() as runtime, runtime.reserve(slots=1) as pool:
            trainer = pool.spawn({"t": colocate.role(Trainer)}).role("t", Trainer)
            for _ in range(3):
                trainer.update.submit()
            if "goes on" in sys.argv:
                trainer.step()
        sys.exit()
    for how in ("goes on", "ends"):
        done = subprocess.run([sys.executable, __file__, mode(), "inner", how], capture_output=True, text=True)
        words = "the update went wrong" if how == "goes on" else "t.update"
        told = "nobody has asked about" in done.stderr and words in done.stderr
        verdict(f"it is told when the loop {how}", told, done.stderr)
    end()

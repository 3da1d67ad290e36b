"""What this bench does, done by Monarch: a script for its environment, which times what each line asks for."""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from typing import Any

import torch

monarch: Any = importlib.import_module("monarch.actor")
_TENSOR_BYTES = 64 << 20


class Probe(monarch.Actor):  # type: ignore[misc]  # it isn't there where types are checked
    """Needs torch, as most do."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(8, 8)

    @monarch.endpoint  # type: ignore[untyped-decorator]
    def noop(self) -> None:
        """Nothing."""

    @monarch.endpoint  # type: ignore[untyped-decorator]
    def echo(self, x: Any) -> Any:
        return x


class Asked:
    """Two processes, and what is done with them."""

    def __init__(self) -> None:
        self.started = 0
        self.processes: Any = None
        self.start()
        self.x = torch.rand(_TENSOR_BYTES // 4)

    def start(self) -> None:
        """Two new ones, in the place of those that there were; these are up when they have answered."""
        self.stop()
        self.processes = monarch.this_host().spawn_procs(per_host={"gpus": 2})
        self.started += 1
        self.probes = self.processes.spawn(f"probe{self.started}", Probe)
        self.noop()

    def noop(self) -> None:
        self.probes.noop.call().get()

    def echo(self) -> None:
        self.probes.slice(gpus=0).echo.call_one(self.x).get()

    def stop(self) -> None:
        if self.processes is not None:
            self.processes.stop().get()
            self.processes = None


def main() -> None:
    """For each line "WHAT TIMES", a line: the median of so many times, in seconds."""
    asked = Asked()
    for line in sys.stdin:
        what, times = line.split()
        found: list[float] = []
        for _ in range(int(times)):
            if what == "start":
                asked.stop()  # that isn't a part of it
            began = time.perf_counter()
            getattr(asked, what)()
            found.append(time.perf_counter() - began)
        print(statistics.median(found), flush=True)
    asked.stop()


if __name__ == "__main__":
    main()

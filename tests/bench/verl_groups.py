"""Calls of worker groups as verl's trainers make them, in verl's environment: it reads names and prints seconds.

python verl_groups.py ROWS COLUMNS

The groups are verl's own `RayWorkerGroup`s, or colocate's with COLOCATE_VERL=ray. The names are those of `CALLS`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls


class Adder(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def total(self, data: DataProto) -> DataProto:
        """Return a number per rank, which the driver adds up."""
        return DataProto.from_dict({"total": data.batch["x"].sum().reshape(1)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def hang(self, begun: str) -> None:
        Path(begun, str(self.rank)).touch()
        threading.Event().wait()


CALLS = {"nothing": 200, "call": 3, "chain": 1, "death": 1}
"""The repetitions of each call; the median counts. No call is possible after "death"."""


def main() -> None:
    rows, columns = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder:
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        answers, sys.stdout = sys.stdout, sys.stderr  # verl prints to stdout, and Ray at a worker's death
        roles: dict[str, Any] = {name: RayClassWithInitArgs(ray.remote(Adder)) for name in ("a", "b", "c", "d")}
        pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(pool, create_colocated_worker_cls(roles))
        views = group.spawn(roles.keys())
        batch = DataProto.from_dict({"x": torch.zeros(rows, columns)})

        def total(value: DataProto) -> float:
            return float(views["c"].total(value).batch["total"].sum())

        def chain() -> None:
            value = batch
            for name in "abcdab":
                value = views[name].add(value)
            assert total(value) == 6.0 * rows * columns

        def death() -> None:
            """Kill a worker, and wait for the error of a waiting call; the time counts from the SIGKILL."""
            pid, begun = views["a"].pid()[1], Path(folder, "begun")
            begun.mkdir()
            results = views["a"].hang(str(begun))
            while len(os.listdir(begun)) < len(results):
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
            began[0] = time.perf_counter()
            with contextlib.suppress(Exception):  # each library raises its own
                ray.get(results)
                raise SystemExit("a call of a dead worker has ended well")

        began = [0.0]
        calls: dict[str, Callable[[], object]] = {
            "nothing": views["a"].nothing,
            "call": lambda: total(batch),
            "chain": chain,
            "death": death,
        }
        for line in sys.stdin:
            name, seconds = line.strip(), []
            for _ in range(CALLS[name]):
                began[0] = time.perf_counter()
                calls[name]()
                seconds.append(time.perf_counter() - began[0])
            print(statistics.median(seconds), file=answers, flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()

"""A chain of role calls by values through verl's fused worker group. Runs in verl's own environment; prints seconds.

python verl_chain.py ROWS COLUMNS ROUNDS
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ.update(RAY_AUTH_MODE="disabled", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls


class Adder(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def total(self, data: DataProto) -> DataProto:
        """A number per rank, which the driver adds up."""
        return DataProto.from_dict({"total": data.batch["x"].sum().reshape(1)})


def main() -> None:
    rows, columns, rounds = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder:
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        with contextlib.redirect_stdout(sys.stderr):
            roles: dict[str, Any] = {name: RayClassWithInitArgs(ray.remote(Adder)) for name in ("a", "b", "c", "d")}
            pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
            group = RayWorkerGroup(pool, create_colocated_worker_cls(roles))
            views = group.spawn(roles.keys())
        order = [views[name] for name in "abcdab"]
        batch = DataProto.from_dict({"x": torch.zeros(rows, columns)})
        seconds = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            value = batch
            for view in order:
                value = view.add(value)
            total = float(views["c"].total(value).batch["total"].sum())
            seconds.append(time.perf_counter() - began)
            assert total == 6.0 * rows * columns
        print(json.dumps(statistics.median(seconds[1:])), flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()

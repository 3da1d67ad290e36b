"""A cluster in a process of its own, which many tests join: `python shared.py ray|dask`. It ends with its input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_DASK_WORKERS = 12


@contextmanager
def cluster(engine: str) -> Iterator[dict[str, Any]]:
    """Start one; what to connect with."""
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short, for Ray
        token = Path(folder) / "token"
        token.write_text("cd" * 32)
        process = subprocess.Popen(
            [sys.executable, __file__, engine],
            env={
                **os.environ,
                "RAY_TMPDIR": folder,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(token),
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                # No processes in stock: the leak checks would count those that Ray starts and doesn't need.
                "RAY_prestart_worker_first_driver": "0",
                "RAY_enable_worker_prestart": "0",
                "RAY_num_workers_soft_limit": "0",
                "RAY_idle_worker_killing_time_threshold_ms": "100",
                "RAY_kill_idle_workers_interval_ms": "100",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            options = json.loads(process.stdout.readline())
            yield {**options, "token_file": str(token)} if engine == "ray" else options
            process.communicate(timeout=60)


def ray() -> None:
    """A node with 8 CPUs."""
    import ray

    context = ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tell(context.address_info["gcs_address"])
    ray.shutdown()


def dask() -> None:
    """A scheduler, and workers in the same process: roles run in processes beside it anyway."""
    from distributed import LocalCluster

    options: dict[str, Any] = {"threads_per_worker": 1, "memory_limit": 0, "dashboard_address": None}
    with LocalCluster(n_workers=_DASK_WORKERS, processes=False, protocol="tcp", host="127.0.0.1", **options) as made:
        tell(made.scheduler_address)


def tell(address: str) -> None:
    """Say where it is, and wait until it isn't needed any more."""
    print(json.dumps({"address": address}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"ray": ray, "dask": dask}[sys.argv[1]]()

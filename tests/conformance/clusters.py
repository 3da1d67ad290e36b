"""A cluster in its own process, which many tests join: `python clusters.py ray|dask`. It ends with its input."""

from __future__ import annotations

import json
import sys
from typing import Any

# Shared groups take eight, the largest test six more, and ten die in tests; none is replaced.
_DASK_WORKERS = 24


def ray() -> None:
    from ray.cluster_utils import Cluster

    made: Any = Cluster
    spared = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}  # saves seconds of CPU time
    cluster = made(initialize_head=True, head_node_args={"num_cpus": 8, **spared})
    tell(cluster.address)
    cluster.shutdown()


def dask() -> None:
    """Run a scheduler with workers in the same process: roles run in their own processes anyway."""
    from distributed import LocalCluster

    options: dict[str, Any] = {"threads_per_worker": 1, "memory_limit": 0, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(n_workers=_DASK_WORKERS, processes=False, protocol="tcp", host="127.0.0.1", **options) as made:
        tell(made.scheduler_address)


def tell(address: str) -> None:
    print(json.dumps({"address": address}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"ray": ray, "dask": dask}[sys.argv[1]]()

"""A Dask cluster without workers, in its own process, with commands on stdin: `adapt MOST`, `scale COUNT`.

The program prints the options to connect with, and ends at the end of its input.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from distributed import LocalCluster


def main() -> None:
    options: dict[str, Any] = {"threads_per_worker": 1, "memory_limit": 0, "dashboard_address": "127.0.0.1:0"}
    local: Any = LocalCluster
    with local(n_workers=0, processes=False, protocol="tcp", host="127.0.0.1", **options) as cluster:
        print(json.dumps({"address": cluster.scheduler_address}), flush=True)
        for line in sys.stdin:
            what, count = line.split()
            if what == "adapt":
                cluster.adapt(minimum=0, maximum=int(count), interval="100ms", wait_count=3)
            else:
                cluster.scale(int(count))
            print("done", flush=True)


if __name__ == "__main__":
    main()

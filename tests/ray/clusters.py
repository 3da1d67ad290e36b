"""A cluster of two raylets on this machine, in its own process, which tests join as drivers do.

The program prints the options to connect with, then reads commands: `add` another node, `drain` it as a cloud takes it
back, `remove` it as a machine fails, `end` it as an autoscaler does. It ends at the end of its input.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason


def main() -> None:
    made: Any = Cluster
    spared = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}  # saves seconds of CPU time
    head = {"num_cpus": 2, "num_gpus": 1, "labels": {"zone": "a", "rack": "r"}, **spared}
    cluster = made(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1, num_gpus=2, labels={"zone": "b", "rack": "r"}, resources={"disk": 1})
    print(json.dumps({"address": cluster.address}), flush=True)
    third: Any = None
    for line in sys.stdin:
        if line == "add\n":
            third = cluster.add_node(num_cpus=1)
        elif line == "drain\n":
            reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            deadline = int(1000 * (time.time() + 300))
            accepted, why = GcsClient(address=cluster.address).drain_node(third.node_id, reason, "spot", deadline)
            assert accepted, why
        else:
            cluster.remove_node(third, allow_graceful=line == "end\n")
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

"""A Ray whose autoscaler starts nodes on this machine, up to two of 2 CPUs, in its own process.

The program prints the options to connect with after the autoscaler's first status, and ends at the end of its input.
The environment has `RAY_FAKE_CLUSTER`, for the provider of nodes.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray._raylet
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray.cluster_utils import Cluster
from ray.util import get_node_ip_address

_COMMANDS = [f"{when}_commands" for when in ("setup", "initialization", "head_setup", "worker_setup")]
_NOTHING: dict[str, Any] = {  # keys that a config of Ray requires
    **{key: {} for key in ("auth", "docker", "file_mounts")},
    **{key: [] for key in (*_COMMANDS, "head_start_ray_commands", "worker_start_ray_commands")},
    **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    "file_mounts_sync_continuously": False,
}
_PROVIDER = {
    "type": "fake_multinode",
    "use_node_id_as_ip": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
    "launch_multiple": True,
}


def main() -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    address_of_node: Any = get_node_ip_address
    address = f"{address_of_node()}:{port}"
    worker = {"CPU": 2, "object_store_memory": 10**8}
    config = {
        **_NOTHING,
        "cluster_name": "fake_multinode",
        "provider": {**_PROVIDER, "gcs_address": address},
        "max_workers": 2,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.05,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "cpu": {
                "resources": worker,
                "node_config": {},
                "labels": {"kind": "new"},
                "min_workers": 0,
                "max_workers": 2,
            },
        },
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        Path(file.name).write_text(json.dumps(config))
        made: Any = Cluster
        spared = {"include_dashboard": False, "include_log_monitor": False}
        own: dict[str, Any] = {"gcs_server_port": port, "autoscaling_config": file.name, "num_cpus": 0}
        own["env_vars"] = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID}
        cluster = made(initialize_head=True, head_node_args={**own, **spared})
        parts: Any = ray._raylet
        store = parts.GcsClient(address=address)
        while store.internal_kv_get(b"__autoscaling_status", None) is None:
            time.sleep(0.1)
        print(json.dumps({"address": address}), flush=True)
        sys.stdin.read()
        cluster.shutdown()


if __name__ == "__main__":
    main()

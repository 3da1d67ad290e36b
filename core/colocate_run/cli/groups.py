"""`colocate groups` and `colocate close`: the detached pools of a cluster, and the end of one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from colocate.driver import Driver
from colocate.texts import made_for
from colocate_run.cli.cluster import Cluster
from colocate_run.cli.output import guarded, print_json
from colocate_run.screen import console, show_table


def show_groups(cluster: Cluster, *, json: bool) -> int:
    """Show the detached pools of a cluster."""

    def command() -> int:
        with cluster.joined("groups", "detached pools") as runtime:
            found = sorted(runtime.detached(), key=lambda each: str(each["name"]))
        if json:
            print_json(
                {
                    "pools": [
                        {**each, "since": time.strftime("%FT%T%z", time.localtime(each["since"]))} for each in found
                    ]
                }
            )
        elif found:
            show_table("detached pools", [_row(each) for each in found], console())
        else:
            console().print(Text("no pool is detached in this cluster"), soft_wrap=True)
        return 0

    return guarded(command, as_json=json)


def close_pool(name: str, cluster: Cluster, *, force: bool, json: bool) -> int:
    """End a detached pool."""

    def command() -> int:
        what = f"close {name}"
        with cluster.joined(what, "detached pools") as runtime, made_for((f"colocate {what}", 0)):
            Driver(runtime).close_detached(name, force)
        if json:
            print_json({"closed": name})
        else:
            console().print(Text(f"closed: {name}"), soft_wrap=True)
        return 0

    return guarded(command, as_json=json)


def _row(found: Mapping[str, Any]) -> dict[str, Any]:
    groups = ", ".join(f"{name} ({', '.join(roles)})" for name, roles in found["groups"].items())
    left = "" if found["left_s"] is None else f"{found['left_s']:.0f} s"
    driver = found["driver"] or ""
    if not found["answers"]:
        driver = "(it doesn't answer)"
    return {
        "name": found["name"],
        "groups": groups,
        "slots": found["slots"],
        "nodes": ", ".join(found["nodes"]),
        "driver": f"{driver}, owns it" if driver and found["owned"] else driver,
        "left": left,
        "epoch": "" if found["epoch"] is None else found["epoch"],
    }

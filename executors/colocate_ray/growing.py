"""Whether a Ray cluster has an autoscaler, and what that says of itself. In the envoy's process.

Pending placement groups are all that it needs to be told. Ray has no public word for whether there is one: of both its
generations the report is read, in which a cluster without one calls each type of node after a single node.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import ray

_STATUS = b"__autoscaling_status"
_NO_TYPE = "node_"
_NEXT_WITHIN_S = 15.0  # an autoscaler makes a report every 5 s
_LOOKS_AGAIN_S = 0.2


@attrs.frozen
class Autoscaler:
    """What an autoscaler has said last: how many nodes of each type there are, and come, and why others don't."""

    nodes: Counter[str]
    coming: Counter[str]
    failures: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The same in words, for an error."""
        found = f"Ray's autoscaler has {_counted(self.nodes)}"
        if self.coming:
            found += f", and waits for {_counted(self.coming)}"
        elif not self.failures:
            found += ", and makes no more: of its types of nodes none would do, or there are as many as may be"
        return found + "".join(f"; {failure}" for failure in self.failures)


def autoscaler(within_s: float = 0.0) -> Autoscaler | None:
    """Return what the cluster's autoscaler says; None when it has none.

    Args:
        within_s: Seconds to wait for another report, if one has no node, not even the head: that tells nothing. So do
            the first ones of a cluster that has just started.
    """
    deadline = time.monotonic() + min(within_s, _NEXT_WITHIN_S)
    while True:
        try:
            found = _first_generation() or _second_generation()
        except Exception:  # what its report looks like is nothing that Ray promises
            return None
        types = [*(found.nodes if found else ()), *(found.coming if found else ())]
        if found is None or types or time.monotonic() >= deadline:
            return found if any(not each.startswith(_NO_TYPE) for each in types) else None
        time.sleep(_LOOKS_AGAIN_S)


def _first_generation() -> Autoscaler | None:
    from ray._private import worker  # an actor's has no other way to the store

    here: Any = worker.global_worker
    status = here.gcs_client.internal_kv_get(_STATUS, None)
    if not status:
        return None
    report = json.loads(status).get("autoscaler_report")
    if report is None:  # the autoscaler has yet to hear of a node
        return Autoscaler(Counter(), Counter())
    there = Counter(report["active_nodes"]) + Counter(report["idle_nodes"] or {})
    coming = Counter(report["pending_launches"]) + Counter(type for _, type, *_ in report["pending_nodes"])
    failures = [f"a node {type} failed" for _, type in report["failed_nodes"]]
    for name, known in report["node_availability_summary"]["node_availabilities"].items():
        if (why := known["unavailable_node_information"]) is not None:
            failures.append(f"no {name} is to be had: {why['description'] or why['category']}")
    return Autoscaler(there, coming, tuple(failures))


def _second_generation() -> Autoscaler | None:
    from ray.autoscaler.v2.sdk import get_cluster_status

    ask: Callable[[str], Any] = get_cluster_status
    status = ask(ray.get_runtime_context().gcs_address)
    if not int(status.stats.autoscaler_version or 0):
        return None
    launches: Counter[str] = Counter()
    for each in status.pending_launches:
        launches[each.ray_node_type_name] += each.count
    failures = [
        f"{each.count} {each.ray_node_type_name} couldn't be launched: {each.details}"
        for each in status.failed_launches
    ]
    there = _types([*status.active_nodes, *status.idle_nodes])
    return Autoscaler(there, launches + _types(status.pending_nodes), tuple(dict.fromkeys(failures)))


def _types(nodes: Iterable[Any]) -> Counter[str]:
    return Counter(node.ray_node_type_name for node in nodes)


def _counted(types: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items())) or "no node"

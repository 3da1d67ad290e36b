"""The detection of a Ray cluster's autoscaler, and the autoscaler's report. Runs in the envoy and `Owner` actors.

Pending placement groups trigger an autoscaler without further requests. Ray has no public sign of an autoscaler, so the
reports of both generations of autoscalers are read. Without an autoscaler, each node type in the report is named after
a single node.
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
_NEXT_WITHIN_S = 15.0  # An autoscaler reports every 5 seconds.
_LOOKS_AGAIN_S = 0.2


@attrs.frozen
class Autoscaler:
    """The last report of an autoscaler: present and coming nodes by type, and failures to get nodes."""

    nodes: Counter[str]
    coming: Counter[str]
    failures: tuple[str, ...] = ()

    @property
    def describe(self) -> str:
        """The report as text for an error."""
        text = f"Ray's autoscaler has {_format_counts(self.nodes)}"
        if self.coming:
            text += f", and waits for {_format_counts(self.coming)}"
        elif not self.failures:
            text += ", and makes no more: of its types of nodes none would do, or there are as many as may be"
        return text + "".join(f"; {failure}" for failure in self.failures)


def read_autoscaler(within_s: float = 0.0) -> Autoscaler | None:
    """Return the report of the cluster's autoscaler; None for a cluster without an autoscaler.

    Args:
        within_s: Seconds to wait for another report if a report has no nodes at all. The first reports of a new cluster
            are empty like this, and prove nothing.
    """
    deadline = time.monotonic() + min(within_s, _NEXT_WITHIN_S)
    while True:
        try:
            status = _read_first_generation() or _read_second_generation()
        except Exception:  # The report may have any format, since Ray promises none.
            return None
        types = [*(status.nodes if status else ()), *(status.coming if status else ())]
        if status is None or types or time.monotonic() >= deadline:
            return status if any(not name.startswith(_NO_TYPE) for name in types) else None
        time.sleep(_LOOKS_AGAIN_S)


def _read_first_generation() -> Autoscaler | None:
    from ray._private import worker  # An actor has no other access to Ray's internal key-value store.

    this_worker: Any = worker.global_worker
    status = this_worker.gcs_client.internal_kv_get(_STATUS, None)
    if not status:
        return None
    report = json.loads(status).get("autoscaler_report")
    if report is None:  # The autoscaler hasn't seen any node so far.
        return Autoscaler(Counter(), Counter())
    existing = Counter(report["active_nodes"]) + Counter(report["idle_nodes"] or {})
    coming = Counter(report["pending_launches"]) + Counter(type for _, type, *_ in report["pending_nodes"])
    failures = [f"a node {type} failed" for _, type in report["failed_nodes"]]
    for name, availability in report["node_availability_summary"]["node_availabilities"].items():
        if (why := availability["unavailable_node_information"]) is not None:
            failures.append(f"no {name} is to be had: {why['description'] or why['category']}")
    return Autoscaler(existing, coming, tuple(failures))


def _read_second_generation() -> Autoscaler | None:
    from ray.autoscaler.v2.sdk import get_cluster_status

    ask: Callable[[str], Any] = get_cluster_status
    status = ask(ray.get_runtime_context().gcs_address)
    if not int(status.stats.autoscaler_version or 0):
        return None
    launches: Counter[str] = Counter()
    for failure in status.pending_launches:
        launches[failure.ray_node_type_name] += failure.count
    failures = [
        f"{failure.count} {failure.ray_node_type_name} couldn't be launched: {failure.details}"
        for failure in status.failed_launches
    ]
    existing = _count_types([*status.active_nodes, *status.idle_nodes])
    return Autoscaler(existing, launches + _count_types(status.pending_nodes), tuple(dict.fromkeys(failures)))


def _count_types(nodes: Iterable[Any]) -> Counter[str]:
    return Counter(node.ray_node_type_name for node in nodes)


def _format_counts(types: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items())) or "no node"

"""The nodes of a Ray cluster, and the resources of nodes. Runs in the envoy and `Owner` actors."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RpcError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from colocate.errors import ClusterError, PlacementError
from colocate.executor import Node, Request
from colocate.placement import can_ever_fit, describe_request, table
from colocate_ray.silence import ID, SilentNodes, find_answering

_COUNTED = ("CPU", "GPU", "memory", "object_store_memory")
_HEAD, _LEAST = "node:__internal_head__", 0.0001  # The second constant is Ray's smallest amount of a resource.
_HEAD_ANSWERS_WITHIN_S, _SLOW_HEAD_ANSWERS_WITHIN_S = 1.0, 4.0


class Nodes:
    """The nodes of the cluster, by name. Thread-safe.

    The name is the machine's name. If several nodes have the same, a part of Ray's id is appended.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._silence = SilentNodes()
        self._lock = threading.Lock()

    def list_offers(self) -> list[Node]:
        """List all live nodes with their total resources, ordered by name."""
        return [self._make_offer(node, node["Resources"]) for node in self._list_alive()]

    def name_of(self, node_id: str) -> str:
        """Return the name of a node, given Ray's id of the node."""
        with self._lock:
            name = self._names.get(node_id)
        if name is None:
            self._list_alive()
        return self._names.get(node_id, node_id[:12])

    def check_possible(self, request: Request) -> None:
        """Check that a request could fit into the empty cluster.

        Raises:
            PlacementError: The request can never fit.
            ClusterError: Ray has no live nodes.
        """
        offers = self.list_offers()
        if not offers:
            raise ClusterError("the Ray cluster has no node that is alive: it has ended, or is just ending")
        if not self.is_possible(request):
            raise PlacementError(describe_request(request, "can never fit"), nodes=self.offer_table(request))

    def is_possible(self, request: Request) -> bool:
        """Return whether a request would fit into the empty cluster."""
        return can_ever_fit(self.list_offers(), request)

    def fits_now(self, request: Request) -> bool:
        """Return whether a request would fit into the resources that Ray reports as free."""
        return can_ever_fit([free for _, free in self._read_offers()], request)

    def offer_table(self, request: Request) -> tuple[dict[str, str], ...]:
        """Return a table row for each node, with the request, the node's total, and the node's free part."""
        silent, nodes = self.find_silent(), self._read_offers()
        rows = zip(nodes, table(request, nodes), strict=True)
        return tuple(
            row | ({"free": "doesn't answer"} if offer.labels[ID] in silent else {}) for (offer, _), row in rows
        )

    def find_silent(self) -> frozenset[str]:
        """Return the ids of nodes that don't answer, but count as alive in Ray.

        Ray would wait on such a node for ever.
        """
        return self._silence.find_silent({node["NodeID"]: _node_address(node) for node in self._list_alive()})

    def _read_offers(self) -> list[tuple[Node, Node]]:
        free = _read_free()
        return [
            (self._make_offer(node, node["Resources"]), self._make_offer(node, free.get(node["NodeID"], {})))
            for node in self._list_alive()
        ]

    def choose_answering(self, stays: bool) -> str:
        """Return the id of a node that answers. With `stays` this is the head, which no autoscaler ends."""
        silent, alive = self.find_silent(), self._list_alive()
        candidates = [node["NodeID"] for node in alive if not stays or _HEAD in node["Resources"]]
        choice: str = random.choice([node_id for node_id in candidates if node_id not in silent] or candidates)
        return choice

    @staticmethod
    def pin_to_node(node_id: str) -> dict[str, Any]:
        """Return options that place an actor on a node, where the actor holds a tiny part of the node's own resource.

        Without any resource, Ray might ask any node to place the actor, even an unresponsive node.
        """
        (resources,) = (node["Resources"] for node in _list_nodes() if node["NodeID"] == node_id)
        itself = next((name for name in resources if name.startswith("node:") and name != _HEAD), None)
        return {
            "num_cpus": 0,
            "resources": {itself: _LEAST} if itself else {},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }

    @staticmethod
    def find_holding(group_id: str) -> set[str]:
        """Return the ids of nodes that still reserve resources for a placement group."""
        return {node_id for node_id, free in _read_free().items() if any(group_id in resource for resource in free)}

    def find_gone(self, node_ids: set[str]) -> set[str]:
        """Return the nodes among `node_ids` that don't answer. Ray itself notices this only after many seconds."""
        alive = {
            node["NodeID"]: _node_address(node)
            for node in _list_nodes()
            if node["Alive"] and node["NodeID"] in node_ids
        }
        return node_ids - alive.keys() | self._silence.find_silent(alive)

    def find_leaving(self) -> dict[str, float | None]:
        """Return the draining nodes by name, with the time of their end if there is a deadline.

        Uses private parts of Ray, because Ray has no public API for drains.
        """
        from ray._private.state import state

        return {self.name_of(node): until / 1000 or None for node, until in state.get_draining_nodes().items()}

    def _list_alive(self) -> list[dict[str, Any]]:
        alive = [node for node in _list_nodes() if node["Alive"]]
        with self._lock:
            machines = [node["NodeManagerHostname"] for node in alive]
            for node in alive:
                machine = node["NodeManagerHostname"]
                alone = machines.count(machine) == 1 and machine not in self._names.values()
                self._names.setdefault(node["NodeID"], machine if alone else f"{machine}/{node['NodeID'][:6]}")
            return sorted(alive, key=lambda node: natural_key(self._names[node["NodeID"]]))

    def _make_offer(self, node: dict[str, Any], resources: dict[str, float]) -> Node:
        cpus, gpus = resources.get("CPU", 0.0), int(resources.get("GPU", 0))
        further = {name: amount for name, amount in resources.items() if name not in _COUNTED}
        name, memory = self._names[node["NodeID"]], int(resources.get("memory", 0))
        return Node(name, cpus, gpus, memory, node["Labels"], further)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers in names by value, so that node-2 comes before node-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def find_head_fault() -> str | None:
    """Return Ray's error text if the head of the cluster doesn't answer; None if the head answers.

    The head is asked whether its store has some key, which is the cheapest request with a timeout. A head that is
    merely slow still answers the greeting of any gRPC client, and then gets more time.
    """
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    words = _ask_head(_HEAD_ANSWERS_WITHIN_S)
    if words is None or not find_answering({"": (host.strip("[]"), int(port))}, _HEAD_ANSWERS_WITHIN_S):
        return words
    return _ask_head(_SLOW_HEAD_ANSWERS_WITHIN_S)


def _ask_head(within_s: float) -> str | None:
    client: Callable[[], Any] = internal_kv.internal_kv_get_gcs_client
    try:
        client().internal_kv_exists(b"", None, timeout=within_s)
    except RpcError as error:
        return str(error).rstrip(".")
    return None


def _node_address(node: dict[str, Any]) -> tuple[str, int]:
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def _read_free() -> dict[str, dict[str, float]]:
    """Return the free resources of each node. Uses private parts of Ray, because Ray has no public API for this."""
    from ray._private import state

    ask: Callable[[], dict[str, dict[str, float]]] = state.available_resources_per_node
    return ask()


def _list_nodes() -> list[dict[str, Any]]:
    ask: Callable[[], list[dict[str, Any]]] = ray.nodes
    return ask()

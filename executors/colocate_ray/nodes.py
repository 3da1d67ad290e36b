"""What a Ray cluster offers, and what of it is free. In the envoy's process."""

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
from colocate.placement import can_ever_fit, table, words
from colocate_ray.silence import ID, Silence, answering

_COUNTED = ("CPU", "GPU", "memory", "object_store_memory")
_HEAD, _LEAST = "node:__internal_head__", 0.0001  # the least that Ray counts
_HEAD_ANSWERS_WITHIN_S, _SLOW_HEAD_ANSWERS_WITHIN_S = 1.0, 4.0


class Nodes:
    """The nodes of the cluster, by the names of their machines; where these are equal, with a part of Ray's id.

    Thread-safe.
    """

    def __init__(self) -> None:
        """Look when asked."""
        self._names: dict[str, str] = {}
        self._silence = Silence()
        self._lock = threading.Lock()

    def offers(self) -> list[Node]:
        """Return what there is, whether free or not, ordered by name."""
        return [self._offer(node, node["Resources"]) for node in self._alive()]

    def name(self, node_id: str) -> str:
        """The name of a node."""
        with self._lock:
            known = self._names.get(node_id)
        if known is None:
            self._alive()
        return self._names.get(node_id, node_id[:12])

    def check_possible(self, request: Request) -> None:
        """Refuse what can never fit.

        Raises:
            PlacementError: It can't.
            ClusterError: Ray has no nodes any more.
        """
        offers = self.offers()
        if not offers:
            raise ClusterError("the Ray cluster has no node that is alive: it has ended, or is just ending")
        if not self.possible(request):
            raise PlacementError(words(request, "can never fit"), nodes=self.table(request))

    def possible(self, request: Request) -> bool:
        """Whether it would fit if all were free."""
        return can_ever_fit(self.offers(), request)

    def fits_now(self, request: Request) -> bool:
        """Whether it would fit into what Ray says is free."""
        return can_ever_fit([free for _, free in self._offers_and_free()], request)

    def table(self, request: Request) -> tuple[dict[str, str], ...]:
        """A row for each node: what is wanted in all, what the node has, what of it is free."""
        silent, nodes = self.silent(), self._offers_and_free()
        rows = zip(nodes, table(request, nodes), strict=True)
        return tuple(row | ({"free": "doesn't answer"} if each.labels[ID] in silent else {}) for (each, _), row in rows)

    def silent(self) -> frozenset[str]:
        """Ids of the nodes that don't answer, and that Ray has not found to be gone: it would wait on them for ever."""
        return self._silence.among({node["NodeID"]: _address(node) for node in self._alive()})

    def _offers_and_free(self) -> list[tuple[Node, Node]]:
        """Return what each node has, and what of it is free."""
        free = _free()
        return [
            (self._offer(node, node["Resources"]), self._offer(node, free.get(node["NodeID"], {})))
            for node in self._alive()
        ]

    def one_that_answers(self, stays: bool) -> str:
        """The id of a node that answers; if it has to stay, of the head, which no autoscaler ends."""
        silent, alive = self.silent(), self._alive()
        there = [node["NodeID"] for node in alive if not stays or _HEAD in node["Resources"]]
        found: str = random.choice([each for each in there if each not in silent] or there)
        return found

    @staticmethod
    def at(node_id: str) -> dict[str, Any]:
        """How an actor is placed on a node: it holds next to nothing of what each node has a whole one of.

        Ray has any node place an actor that holds nothing, be it one that doesn't answer.
        """
        (found,) = (node["Resources"] for node in _every() if node["NodeID"] == node_id)
        itself = next((name for name in found if name.startswith("node:") and name != _HEAD), None)
        return {
            "num_cpus": 0,
            "resources": {itself: _LEAST} if itself else {},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }

    @staticmethod
    def holding(group_id: str) -> set[str]:
        """Ids of the nodes that still set something aside for a placement group."""
        return {node_id for node_id, free in _free().items() if any(group_id in resource for resource in free)}

    def gone(self, node_ids: set[str]) -> set[str]:
        """Return those of some nodes that don't answer. Ray itself finds out only after many seconds."""
        alive = {node["NodeID"]: _address(node) for node in _every() if node["Alive"] and node["NodeID"] in node_ids}
        return node_ids - alive.keys() | self._silence.among(alive)

    def leaving(self) -> dict[str, float | None]:
        """Nodes that are drained, by name, with their deadline if they have one; Ray has no public way to ask."""
        from ray._private.state import state

        return {self.name(node): until / 1000 or None for node, until in state.get_draining_nodes().items()}

    def _alive(self) -> list[dict[str, Any]]:
        alive = [node for node in _every() if node["Alive"]]
        with self._lock:
            machines = [node["NodeManagerHostname"] for node in alive]
            for node in alive:
                machine = node["NodeManagerHostname"]
                alone = machines.count(machine) == 1 and machine not in self._names.values()
                self._names.setdefault(node["NodeID"], machine if alone else f"{machine}/{node['NodeID'][:6]}")
            return sorted(alive, key=lambda node: natural(self._names[node["NodeID"]]))

    def _offer(self, node: dict[str, Any], resources: dict[str, float]) -> Node:
        cpus, gpus = resources.get("CPU", 0.0), int(resources.get("GPU", 0))
        further = {name: amount for name, amount in resources.items() if name not in _COUNTED}
        name, memory = self._names[node["NodeID"]], int(resources.get("memory", 0))
        return Node(name, cpus, gpus, memory, node["Labels"], further)


def natural(name: str) -> list[tuple[int, str]]:
    """A key by which node-2 comes before node-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def head_silent() -> str | None:
    """Why the head of the cluster doesn't answer, in Ray's words; None when it does.

    It is asked whether it has some key in its store: of all questions to it the cheapest that Ray gives a time limit.
    A process there that only is slow says so to any gRPC client, and is given more time.
    """
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    words = _asked(_HEAD_ANSWERS_WITHIN_S)
    if words is None or not answering({"": (host.strip("[]"), int(port))}, _HEAD_ANSWERS_WITHIN_S):
        return words
    return _asked(_SLOW_HEAD_ANSWERS_WITHIN_S)


def _asked(within_s: float) -> str | None:
    client: Callable[[], Any] = internal_kv.internal_kv_get_gcs_client
    try:
        client().internal_kv_exists(b"", None, timeout=within_s)
    except RpcError as error:
        return str(error).rstrip(".")
    return None


def _address(node: dict[str, Any]) -> tuple[str, int]:
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def _free() -> dict[str, dict[str, float]]:
    """Return what is free on each node; Ray has no public way to ask."""
    from ray._private import state

    ask: Callable[[], dict[str, dict[str, float]]] = state.available_resources_per_node
    return ask()


def _every() -> list[dict[str, Any]]:
    ask: Callable[[], list[dict[str, Any]]] = ray.nodes
    return ask()

"""What a Ray cluster offers, and what of it is free. In the envoy's process."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RpcError
from ray.experimental import internal_kv

from colocate.errors import EngineError, PlacementError
from colocate.executor import Node, Request
from colocate.placement import can_ever_fit, table, words

_ANSWERS_WITHIN_S = 1.0
_HEAD_ANSWERS_WITHIN_S = 4.0
_COUNTED = ("CPU", "GPU", "memory", "object_store_memory")


class Nodes:
    """The nodes of the cluster, by the names of their machines; where these are equal, with a part of Ray's id.

    Thread-safe.
    """

    def __init__(self) -> None:
        """Look when asked."""
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()

    def offers(self) -> list[Node]:
        """What there is, whether free or not, ordered by name."""
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
            EngineError: Ray has no nodes any more.
        """
        offers = self.offers()
        if not offers:
            raise EngineError("the Ray cluster has no node that is alive: it has ended, or is just ending")
        if not can_ever_fit(offers, request):
            raise PlacementError(words(request, "can never fit"), nodes=self.table(request))

    def fits_now(self, request: Request) -> bool:
        """Whether it would fit into what Ray says is free."""
        return can_ever_fit([free for _, free in self._offers_and_free()], request)

    def table(self, request: Request) -> tuple[dict[str, str], ...]:
        """A row for each node: what is wanted in all, what the node has, what of it is free."""
        return table(request, self._offers_and_free())

    def _offers_and_free(self) -> list[tuple[Node, Node]]:
        """What each node has, and what of it is free."""
        free = _free()
        return [
            (self._offer(node, node["Resources"]), self._offer(node, free.get(node["NodeID"], {})))
            for node in self._alive()
        ]

    @staticmethod
    def holding(group_id: str) -> set[str]:
        """Ids of the nodes that still set something aside for a placement group."""
        return {node_id for node_id, free in _free().items() if any(group_id in resource for resource in free)}

    @staticmethod
    def gone(node_ids: set[str]) -> set[str]:
        """Those of some nodes that don't answer. Ray itself finds out only after many seconds."""
        return {node["NodeID"] for node in _every() if node["NodeID"] in node_ids and not _answers(node)}

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
    """
    client: Callable[[], Any] = internal_kv.internal_kv_get_gcs_client
    try:
        client().internal_kv_exists(b"", None, timeout=_HEAD_ANSWERS_WITHIN_S)
    except RpcError as error:
        return str(error).rstrip(".")
    return None


def _answers(node: dict[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _ANSWERS_WITHIN_S).close()
    except OSError:
        return False
    return bool(node["Alive"])


def _free() -> dict[str, dict[str, float]]:
    """What is free on each node; Ray has no public way to ask."""
    from ray._private import state

    ask: Callable[[], dict[str, dict[str, float]]] = state.available_resources_per_node
    return ask()


def _every() -> list[dict[str, Any]]:
    ask: Callable[[], list[dict[str, Any]]] = ray.nodes
    return ask()

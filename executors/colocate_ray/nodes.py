"""What a Ray cluster offers, and what of it is free. In the envoy's process."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import ray

from colocate.errors import PlacementError
from colocate.executor import Node, Request
from colocate.placement import Ledger


class Nodes:
    """The nodes of the cluster by the names that we give them. Thread-safe."""

    def __init__(self) -> None:
        """Look when asked."""
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()

    def offers(self) -> list[Node]:
        """What there is, whether free or not, ordered by name."""
        return [self._offer(node["NodeID"], node["Resources"]) for node in self._alive()]

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
        """
        try:
            _fit(self.offers(), request)
        except PlacementError as error:
            raise PlacementError(error.message, nodes=self.table(request)) from None

    def fits_now(self, request: Request) -> bool:
        """Whether it would fit into what Ray says is free."""
        free = _free()
        try:
            _fit([self._offer(node["NodeID"], free.get(node["NodeID"], {})) for node in self._alive()], request)
        except PlacementError:
            return False
        return True

    def table(self, request: Request) -> tuple[dict[str, str], ...]:
        """A row for each node: what is wanted in all, what the node has, what of it is free."""
        free = _free()
        wanted = _amounts(request.cpus * request.slots, request.gpus * request.slots)
        return tuple(
            {
                "node": self.name(node["NodeID"]),
                "wanted": wanted,
                "total": _amounts_of(node["Resources"]),
                "free": _amounts_of(free.get(node["NodeID"], {})),
            }
            for node in self._alive()
        )

    @staticmethod
    def words(request: Request, how: str) -> str:
        """A request in words."""
        each = [f"{request.cpus:g} CPU"] + ([f"{request.gpus} GPU"] if request.gpus else [])
        if request.host_memory_bytes:
            each.append(f"{request.host_memory_bytes / 2**30:.1f} GiB")
        return f"{request.owner or 'a pool'} of {request.slots} slots with {' and '.join(each)} each {how}:"

    @staticmethod
    def mention(group_id: str) -> bool:
        """Whether a node still sets something aside for a placement group."""
        return any(group_id in resource for node in _free().values() for resource in node)

    def _alive(self) -> list[dict[str, Any]]:
        alive: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
        with self._lock:
            for node in alive:
                self._give_name(node)
            return sorted(alive, key=lambda node: self._names[node["NodeID"]])

    def _give_name(self, node: dict[str, Any]) -> None:
        """The machine's name; where several nodes have the same, with a part of the node's id."""
        node_id, machine = node["NodeID"], node["NodeManagerHostname"]
        if node_id not in self._names:
            taken = machine in self._names.values()
            self._names[node_id] = f"{machine}/{node_id[:6]}" if taken else machine

    def _offer(self, node_id: str, resources: dict[str, float]) -> Node:
        cpus, gpus = resources.get("CPU", 0.0), int(resources.get("GPU", 0))
        return Node(self._names[node_id], cpus, gpus, int(resources.get("memory", 0)))


def _fit(nodes: list[Node], request: Request) -> None:
    Ledger(nodes, lambda devices: "").reserve(attrs.evolve(request, timeout=0.0))


def _free() -> dict[str, dict[str, float]]:
    """What is free on each node; Ray has no public way to ask."""
    from ray._private.state import available_resources_per_node

    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


def _amounts_of(resources: dict[str, float]) -> str:
    return _amounts(resources.get("CPU", 0.0), int(resources.get("GPU", 0)))


def _amounts(cpus: float, gpus: int) -> str:
    return f"{cpus:g} CPU, {gpus} GPU"

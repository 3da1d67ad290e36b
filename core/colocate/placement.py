"""A ledger of free resources, for executors of clusters without a scheduler. A request gets all slots or none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs

from colocate._system.deadline import Deadline
from colocate.errors import PlacementError, PlacementTimeout
from colocate.executor import Node, Place, Request, Reservation, Running


@attrs.define(eq=False)
class _Account:
    node: Node
    cpus: float
    devices: list[int]
    memory: float
    resources: dict[str, float]

    @classmethod
    def for_node(cls, node: Node) -> _Account:
        infinite = float("inf")
        cpus = infinite if node.cpus is None else node.cpus
        memory = infinite if node.host_memory_bytes is None else node.host_memory_bytes
        return cls(node, cpus, list(range(node.gpus)), memory, dict(node.resources))

    @property
    def free(self) -> Node:
        """The node's resources that no reservation has taken."""
        cpus = None if self.node.cpus is None else self.cpus
        memory = None if self.node.host_memory_bytes is None else int(self.memory)
        return attrs.evolve(
            self.node, cpus=cpus, gpus=len(self.devices), host_memory_bytes=memory, resources=dict(self.resources)
        )

    def fits(self, request: Request) -> int:
        if not matches(self.node.labels, request.labels):
            return 0
        counts = [
            self.cpus / request.cpus if request.cpus else float("inf"),
            len(self.devices) // request.gpus if request.gpus else float("inf"),
            self.memory / request.host_memory_bytes if request.host_memory_bytes else float("inf"),
            *(self.resources.get(name, 0.0) / amount for name, amount in request.resources.items()),
        ]
        # The small addition corrects rounding: 0.3 / 0.1 is below 3, although three slots of 0.1 CPUs fit.
        return int(min(min(counts) + 1e-6, request.slots))

    def take_place(self, request: Request, device: Callable[[tuple[int, ...]], str]) -> Place:
        self._count(request, -1)
        devices = tuple(self.devices[: request.gpus])
        del self.devices[: request.gpus]
        return Place(self.node.name, devices, device(devices))

    def return_place(self, place: Place, request: Request) -> None:
        self._count(request, 1)
        self.devices = sorted([*self.devices, *place.devices])

    def _count(self, request: Request, slots: int) -> None:
        self.cpus += slots * request.cpus
        self.memory += slots * (request.host_memory_bytes or 0)
        for name, amount in request.resources.items():
            self.resources[name] += slots * amount


class Ledger:
    """A record of the nodes' resources and the reservations. Thread-safe."""

    def __init__(self, nodes: Sequence[Node], device: Callable[[tuple[int, ...]], str]) -> None:
        """Make a ledger.

        Args:
            nodes: The nodes.
            device: Returns torch's name, in the worker, for the device of a slot with these device indices.
        """
        self._accounts = [_Account.for_node(node) for node in nodes]
        self._nodes = list(nodes)
        self._device = device
        self._news = threading.Condition()
        self._held: dict[int, tuple[Reservation, float]] = {}
        self._withdrawn: set[str] = set()  # Ids of requests that must not wait any longer.

    def reserve(self, request: Request) -> Reservation:
        """Reserve all slots of a request, waiting up to the timeout.

        Raises:
            PlacementError: The request can never fit.
            PlacementTimeout: The request didn't fit in time.
        """
        deadline = Deadline(request.timeout)
        with self._news:
            while True:
                if not can_ever_fit(self._nodes, request):
                    raise PlacementError(describe_request(request, "can never fit"), nodes=self._table(request))
                chosen = _assign(self._accounts, request)
                if chosen is not None:
                    places = [account.take_place(request, self._device) for account in chosen]
                    order = {node.name: index for index, node in enumerate(self._nodes)}
                    held = Reservation(tuple(sorted(places, key=lambda p: (order[p.node], p.devices))), request)
                    self._held[id(held)] = held, time.time()
                    return held
                if request.id in self._withdrawn:
                    raise PlacementTimeout(describe_request(request, "was withdrawn while it was waited for"))
                if deadline.is_over or not self._news.wait(deadline.seconds_left):
                    raise PlacementTimeout(
                        describe_request(request, f"did not become free within {request.timeout:g} s"),
                        nodes=self._table(request),
                    )

    def withdraw(self, request: Request) -> None:
        """Stop the wait of a request for slots (for `Executor.withdraw`)."""
        with self._news:
            self._withdrawn.add(request.id)
            self._news.notify_all()

    def release(self, reservation: Reservation) -> None:
        """Return a reservation's slots to the ledger."""
        request: Request = reservation.handle
        with self._news:
            by_name = {account.node.name: account for account in self._accounts}
            for place in reservation.places:
                if place.node in by_name:  # The node may have been removed by `remove_node`.
                    by_name[place.node].return_place(place, request)
            self._held.pop(id(reservation), None)
            self._news.notify_all()

    def remove_node(self, node: str) -> list[Reservation]:
        """Remove a lost node. Slots are neither placed there any more, nor returned to the ledger by a release.

        Waiting requests that can't fit without the node fail at once.

        Args:
            node: The node's name. An unknown name changes nothing.

        Returns:
            The reservations with slots on the node. These must still be released, when their pools are closed or
                reserved again; `Executor.is_lost` must report the slots on the node as lost.
        """
        with self._news:
            self._accounts = [account for account in self._accounts if account.node.name != node]
            self._nodes = [entry for entry in self._nodes if entry.name != node]
            self._news.notify_all()
            held = [reservation for reservation, _ in self._held.values()]
        return [entry for entry in held if any(place.node == node for place in entry.places)]

    def running(self) -> list[Running]:
        """Return the current reservations (for `Executor.running`)."""
        with self._news:
            held = list(self._held.values())
        return [
            Running(
                "reservation",
                reservation.handle.id,
                node=", ".join(dict.fromkeys(place.node for place in reservation.places)),
                since=since,
                detail=f"{len(reservation.places)} slots",
            )
            for reservation, since in held
        ]

    def _table(self, request: Request) -> tuple[dict[str, str], ...]:
        return table(request, [(account.node, account.free) for account in self._accounts])


def can_ever_fit(nodes: Sequence[Node], request: Request) -> bool:
    """Return whether the nodes have room for a request when nothing else is reserved."""
    return _assign([_Account.for_node(node) for node in nodes], request) is not None


def matches(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether a node has the requested labels.

    Args:
        labels: The node's labels.
        wanted: A value by name, or several as in "in(A100,H100)"; a leading "!" means any other value, or none.
    """
    return all(_is_one_of(labels.get(name), value) for name, value in wanted.items())


def _is_one_of(value: str | None, wanted: str) -> bool:
    text = wanted.removeprefix("!")
    several = text[3:-1].split(",") if text.startswith("in(") and text.endswith(")") else [text]
    return (value in [choice.strip() for choice in several]) != wanted.startswith("!")


class Placed(Protocol):
    """An object with constraints on the places of slots: a `Request`, or a pool in a config."""

    @property
    def strategy(self) -> str: ...  # noqa: D102

    @property
    def labels(self) -> Mapping[str, str]: ...  # noqa: D102

    @property
    def resources(self) -> Mapping[str, float]: ...  # noqa: D102

    @property
    def together(self) -> str | None: ...  # noqa: D102


def describe_request(request: Request, how: str) -> str:
    """Describe a request for the line above a table: "pool of 2 slots with 1 CPU each can never fit:"."""
    amounts = [f"{request.cpus:g} CPU"] + ([f"{request.gpus} GPU"] if request.gpus else [])
    if request.host_memory_bytes:
        amounts.append(f"{request.host_memory_bytes / 2**30:.1f} GiB")
    amounts += _describe_resources(request.resources)
    listed = " and ".join([", ".join(amounts[:-1]), amounts[-1]] if amounts[1:] else amounts)
    places = f", {', '.join(constraints)}," if (constraints := _describe_constraints(request)) else ""
    return f"{request.owner or 'a pool'} of {request.slots} slots with {listed} each{places} {how}:"


def describe_placement(placed: Placed) -> str:
    """Describe the constraints on the places of slots in words; "" if there are none."""
    return ", ".join(
        [*(f"{amount} each" for amount in _describe_resources(placed.resources)), *_describe_constraints(placed)]
    )


def _describe_constraints(placed: Placed) -> list[str]:
    strict = {"strict_pack": "all on one node", "strict_spread": "each on a node of its own"}.get(placed.strategy)
    labels = f"on nodes with {_describe_labels(placed.labels)}" if placed.labels else None
    together = f"all of one {placed.together}" if placed.together else None
    return [constraint for constraint in (labels, strict, together) if constraint is not None]


def _describe_labels(labels: Mapping[str, str | None]) -> str:
    return ", ".join(f"no {name}" if value is None else f"{name}={value}" for name, value in labels.items())


def _assign(accounts: Sequence[_Account], request: Request) -> list[_Account] | None:
    """Choose a node's account for each requested slot; return None if the slots don't fit."""
    domains: dict[str | None, list[_Account]] = {}
    for account in accounts:
        if (domain := account.node.labels.get(request.together)) is not None or not request.together:
            domains.setdefault(domain, []).append(account)
    assigned = (_assign_among(candidates, request) for candidates in domains.values())
    return next((candidates for candidates in assigned if candidates is not None), None)


def _assign_among(accounts: Sequence[_Account], request: Request) -> list[_Account] | None:
    """Choose one of the accounts for each requested slot; return None if the slots don't fit."""
    room = {id(account): account.fits(request) for account in accounts}
    if request.strategy == "strict_pack":
        whole = next((account for account in accounts if room[id(account)] >= request.slots), None)
        return None if whole is None else [whole] * request.slots
    if request.strategy == "strict_spread":
        roomy = [account for account in accounts if room[id(account)]]
        return roomy[: request.slots] if len(roomy) >= request.slots else None
    if sum(room.values()) < request.slots:
        return None
    chosen: list[_Account] = []
    if request.strategy == "pack":
        # To use as few nodes as possible, take the nodes with the most room first.
        for account in sorted(accounts, key=lambda account: -room[id(account)]):
            chosen += [account] * min(room[id(account)], request.slots - len(chosen))
        return chosen
    while len(chosen) < request.slots:
        for account in accounts:
            if room[id(account)] and len(chosen) < request.slots:
                room[id(account)] -= 1
                chosen.append(account)
    return chosen


def table(request: Request, nodes: Sequence[tuple[Node, Node]]) -> tuple[dict[str, str], ...]:
    """Return a table with a row for each node: the whole request, the node's resources, and the free resources.

    Args:
        request: The request.
        nodes: Pairs of a node's resources and the free part.
    """
    slots, memory = request.slots, (request.host_memory_bytes or 0) * request.slots
    in_all = {name: amount * slots for name, amount in request.resources.items()}
    whole = Node("", request.cpus * slots, request.gpus * slots, memory, resources=in_all)
    return tuple(
        {
            "node": node.name,
            "wanted": _describe_amounts(whole, request),
            "total": _describe_amounts(node, request),
            "free": _describe_amounts(free, request),
            **labels_column(node.labels, request),
        }
        for node, free in nodes
    )


def labels_column(labels: Mapping[str, str], request: Request) -> dict[str, str]:
    """Return a table column with a node's values of the requested labels; empty if no labels are requested."""
    label_names = dict.fromkeys([*request.labels, *filter(None, [request.together])])
    return {"labels": _describe_labels({name: labels.get(name) for name in label_names})} if label_names else {}


def _describe_amounts(node: Node, request: Request) -> str:
    words = [f"{'any' if node.cpus is None else f'{node.cpus:g}'} CPU", f"{node.gpus} GPU"]
    if request.host_memory_bytes and node.host_memory_bytes is not None:
        words.append(f"{node.host_memory_bytes / 2**30:.1f} GiB")
    return ", ".join(words + _describe_resources({name: node.resources.get(name, 0.0) for name in request.resources}))


def _describe_resources(resources: Mapping[str, float]) -> list[str]:
    return [f"{amount:g} {name}" for name, amount in resources.items()]

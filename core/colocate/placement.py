"""A ledger of nodes, for executors whose cluster keeps none: all or nothing, at once or within a time, never half."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

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

    @classmethod
    def of(cls, node: Node) -> _Account:
        infinite = float("inf")
        cpus = infinite if node.cpus is None else node.cpus
        memory = infinite if node.host_memory_bytes is None else node.host_memory_bytes
        return cls(node, cpus, list(range(node.gpus)), memory)

    def fits(self, request: Request) -> int:
        """How many slots of a request fit here now."""
        counts = [
            self.cpus / request.cpus if request.cpus else float("inf"),
            len(self.devices) // request.gpus if request.gpus else float("inf"),
            self.memory / request.host_memory_bytes if request.host_memory_bytes else float("inf"),
        ]
        # A shade more than the quotient: 0.3 CPUs have room for three slots of 0.1, which 0.3 / 0.1 falls short of.
        return int(min(min(counts) + 1e-6, request.slots))

    def take(self, request: Request, device: Callable[[tuple[int, ...]], str]) -> Place:
        self.cpus -= request.cpus
        self.memory -= request.host_memory_bytes or 0
        devices = tuple(self.devices[: request.gpus])
        del self.devices[: request.gpus]
        return Place(self.node.name, devices, device(devices))

    def give(self, place: Place, request: Request) -> None:
        self.cpus += request.cpus
        self.memory += request.host_memory_bytes or 0
        self.devices = sorted([*self.devices, *place.devices])


class Ledger:
    """What some nodes offer and who holds it. Thread-safe."""

    def __init__(self, nodes: Sequence[Node], device: Callable[[tuple[int, ...]], str]) -> None:
        """Make a ledger.

        Args:
            nodes: The nodes.
            device: What torch calls the device of a slot with these device indices, in the worker.
        """
        self._accounts = [_Account.of(node) for node in nodes]
        self._nodes = list(nodes)
        self._device = device
        self._news = threading.Condition()
        self._held: dict[int, tuple[Reservation, float]] = {}
        self._withdrawn: set[str] = set()  # ids, which come once

    def reserve(self, request: Request) -> Reservation:
        """Take all slots of a request, waiting up to its timeout.

        Raises:
            PlacementError: It could never fit.
            PlacementTimeout: It didn't fit in time.
        """
        deadline = Deadline(request.timeout)
        with self._news:
            while True:
                if not can_ever_fit(self._nodes, request):
                    raise PlacementError(words(request, "can never fit"), nodes=self._table(request))
                chosen = _assign(self._accounts, request)
                if chosen is not None:
                    places = [account.take(request, self._device) for account in chosen]
                    order = {node.name: index for index, node in enumerate(self._nodes)}
                    held = Reservation(tuple(sorted(places, key=lambda p: (order[p.node], p.devices))), request)
                    self._held[id(held)] = held, time.time()
                    return held
                if request.id in self._withdrawn:
                    raise PlacementTimeout(words(request, "was withdrawn while it was waited for"))
                if deadline.is_over or not self._news.wait(deadline.left):
                    raise PlacementTimeout(
                        words(request, f"did not become free within {request.timeout:g} s"),
                        nodes=self._table(request),
                    )

    def withdraw(self, request: Request) -> None:
        """Nobody waits for a request any more (for `Executor.withdraw`)."""
        with self._news:
            self._withdrawn.add(request.id)
            self._news.notify_all()

    def release(self, reservation: Reservation) -> None:
        """Give slots back."""
        request: Request = reservation.handle
        with self._news:
            by_name = {account.node.name: account for account in self._accounts}
            for place in reservation.places:
                if place.node in by_name:  # otherwise the node is gone
                    by_name[place.node].give(place, request)
            self._held.pop(id(reservation), None)
            self._news.notify_all()

    def without(self, node: str) -> list[Reservation]:
        """A node is gone: nothing more is placed there, and nothing of it is given back.

        What waits for slots that can't be had without it is told so at once.

        Args:
            node: Its name. One that isn't known, or not any more, changes nothing.

        Returns:
            The reservations with slots on it. They are still to be released, as their pools are closed or reserved
            anew; `Executor.lost` is to say of these slots that they are lost.
        """
        with self._news:
            self._accounts = [account for account in self._accounts if account.node.name != node]
            self._nodes = [each for each in self._nodes if each.name != node]
            self._news.notify_all()
            held = [reservation for reservation, _ in self._held.values()]
        return [each for each in held if any(place.node == node for place in each.places)]

    def running(self) -> list[Running]:
        """The reservations that are held (for `Executor.running`)."""
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
        rows = []
        for account in self._accounts:
            node, memory = account.node, request.host_memory_bytes
            total = free = None
            if memory and node.host_memory_bytes is not None:
                total, free = node.host_memory_bytes, account.memory
            rows.append(
                {
                    "node": node.name,
                    "wanted": wanted(request),
                    "total": amounts(node.cpus, node.gpus, total),
                    "free": amounts(None if node.cpus is None else account.cpus, len(account.devices), free),
                }
            )
        return tuple(rows)


def can_ever_fit(nodes: Sequence[Node], request: Request) -> bool:
    """Whether some nodes, all of them free, have room for a request."""
    return _assign([_Account.of(node) for node in nodes], request) is not None


def words(request: Request, how: str) -> str:
    """A request in words, before a table: "pool of 2 slots with 1 CPU each can never fit:"."""
    each = [f"{request.cpus:g} CPU"] + ([f"{request.gpus} GPU"] if request.gpus else [])
    if request.host_memory_bytes:
        each.append(f"{request.host_memory_bytes / 2**30:.1f} GiB")
    return f"{request.owner or 'a pool'} of {request.slots} slots with {' and '.join(each)} each {how}:"


def _assign(accounts: Sequence[_Account], request: Request) -> list[_Account] | None:
    """An account for each slot, or None."""
    room = {id(account): account.fits(request) for account in accounts}
    if sum(room.values()) < request.slots:
        return None
    chosen: list[_Account] = []
    if request.strategy == "pack":
        # As few nodes as possible: those with most room first.
        for account in sorted(accounts, key=lambda account: -room[id(account)]):
            chosen += [account] * min(room[id(account)], request.slots - len(chosen))
        return chosen
    while len(chosen) < request.slots:
        for account in accounts:
            if room[id(account)] and len(chosen) < request.slots:
                room[id(account)] -= 1
                chosen.append(account)
    return chosen


def wanted(request: Request) -> str:
    """What a request wants in all."""
    memory = request.host_memory_bytes
    return amounts(
        request.cpus * request.slots, request.gpus * request.slots, memory * request.slots if memory else None
    )


def amounts(cpus: float | None, gpus: int, memory: float | None = None) -> str:
    """What there is of each kind, in words. `cpus` None: not counted; `memory` in bytes, None where nobody asks."""
    words = f"{'any' if cpus is None else f'{cpus:g}'} CPU, {gpus} GPU"
    return words if memory is None else f"{words}, {memory / 2**30:.1f} GiB"

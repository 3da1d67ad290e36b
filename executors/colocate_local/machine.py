"""The common base class of both local executors, which offers this machine as one node."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from colocate.executor import Executor, Node, Request, Reservation, Running, SharedSlots
from colocate.gpus import names, torch_device
from colocate.placement import Ledger


class Machine(Executor, SharedSlots):
    """An executor with slots on this machine. A ledger counts the free CPUs and GPUs."""

    name = "local"

    def __init__(self, node: Node) -> None:
        self._node = node
        self._ledger = Ledger([node], self._device_name)
        self._gpus = names(node.gpus)
        self._runtimes: set[str] = set()  # Ids of the runtimes that have sent requests; in practice only one.

    @staticmethod
    def _device_name(devices: tuple[int, ...]) -> str:
        return torch_device(devices[0] if devices else None)

    def nodes(self) -> Sequence[Node]:
        """Return this machine as the only node."""
        return [self._node]

    def reserve(self, request: Request) -> Reservation:
        """Reserve slots in the ledger of this machine."""
        self._runtimes.add(request.id.partition("/")[0])
        return self._ledger.reserve(request)

    def withdraw(self, request: Request) -> None:
        """Withdraw a request that is waiting for slots."""
        self._ledger.withdraw(request)

    def release(self, reservation: Reservation) -> None:
        """Release the slots of a reservation."""
        self._ledger.release(reservation)

    def running(self) -> Sequence[Running]:
        """List the reservations, and the workers that the operating system or the interpreter shows."""
        return [*self._ledger.running(), *self._list_workers()]

    @abc.abstractmethod
    def _list_workers(self) -> list[Running]:
        """List the workers that are still running."""

    def _is_ours(self, worker: str) -> bool:
        return worker.partition("/")[0] in self._runtimes

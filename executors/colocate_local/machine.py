"""What both variants of the embedded executor share: this machine as one node, and its slots."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from colocate.executor import Executor, Node, Request, Reservation, Running, SharedSlots
from colocate.gpus import names, torch_device
from colocate.placement import Ledger


class Machine(Executor, SharedSlots):
    """This machine, and the slots on it."""

    name = "local"

    def __init__(self, node: Node) -> None:
        """Use `Local.connect`."""
        self._node = node
        self._ledger = Ledger([node], self._device)
        self._gpus = names(node.gpus)
        self._runtimes: set[str] = set()  # ids; it is one, which its requests tell

    @staticmethod
    def _device(devices: tuple[int, ...]) -> str:
        """Return what torch calls a slot's device in its worker."""
        return torch_device(devices[0] if devices else None)

    def nodes(self) -> Sequence[Node]:
        """This machine."""
        return [self._node]

    def reserve(self, request: Request) -> Reservation:
        """Take slots."""
        self._runtimes.add(request.id.partition("/")[0])
        return self._ledger.reserve(request)

    def withdraw(self, request: Request) -> None:
        """Nobody waits for them any more."""
        self._ledger.withdraw(request)

    def release(self, reservation: Reservation) -> None:
        """Give them back."""
        self._ledger.release(reservation)

    def running(self) -> Sequence[Running]:
        """The reservations, and the workers as the operating system or the interpreter shows them."""
        return [*self._ledger.running(), *self._workers()]

    @abc.abstractmethod
    def _workers(self) -> list[Running]:
        """The workers."""

    def _is_ours(self, worker: str) -> bool:
        return worker.partition("/")[0] in self._runtimes

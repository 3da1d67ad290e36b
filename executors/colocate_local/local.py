"""What both variants of the embedded executor share: this machine as one node, and its slots."""

from __future__ import annotations

import abc
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from colocate.executor import Executor, Node, Request, Reservation, Running
from colocate.gpus import count_gpus, names, torch_device
from colocate.keeper import forks
from colocate.placement import Ledger


class Local(Executor):
    """Slots on this machine: threads of the driver, or with `processes=True` a process each."""

    name = "local"

    @classmethod
    def connect(  # type: ignore[override]  # its options are the user's to see
        cls,
        *,
        processes: bool = False,
        cpus: float | None = None,
        gpus: int | None = None,
        strict: bool = False,
    ) -> Executor:
        """Start it.

        Args:
            processes: A process per slot instead of a thread.
            cpus: CPUs to hand out; None doesn't count them.
            gpus: GPUs to hand out; None for those that this process sees.
            strict: Send everything through the wire format, on threads too.
        """
        from colocate_local.processes import LocalProcesses
        from colocate_local.threads import LocalThreads

        node = Node(platform.node(), cpus, count_gpus() if gpus is None else gpus)
        return LocalProcesses(node) if processes else LocalThreads(node, strict)

    @classmethod
    def foresee(cls, options: Mapping[str, Any]) -> None:
        """Have the template of the workers started."""
        if options.get("processes") is True:
            forks.foresee(os.environ)

    @classmethod
    def objection(cls, option: str, value: Any) -> str | None:
        """None: its options count and choose, and name nothing."""
        return None

    @classmethod
    def variant(cls, options: Mapping[str, Any]) -> type[Executor]:
        """The class for slots that are processes, or threads."""
        from colocate_local.processes import LocalProcesses
        from colocate_local.threads import LocalThreads

        return LocalProcesses if options.get("processes") else LocalThreads

    def __init__(self, node: Node) -> None:
        """Use `connect`."""
        self._node = node
        self._ledger = Ledger([node], self._device)
        self._gpus = names(node.gpus)
        self._runtimes: set[str] = set()  # ids; it is one, which its requests tell

    @staticmethod
    def _device(devices: tuple[int, ...]) -> str:
        """What torch calls a slot's device in its worker."""
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

"""The embedded executor: options choose one of two variants, and only that variant is imported."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from colocate.executor import Executor, Node
from colocate.gpus import count_gpus
from colocate.keeper import forks
from colocate_local.machine import Machine


class Local(Machine):
    """Slots on this machine: threads of the driver, or with `processes=True` a process each."""

    @classmethod
    def connect(  # type: ignore[override]  # the signature shows users the options
        cls,
        *,
        processes: bool = False,
        cpus: float | None = None,
        gpus: int | None = None,
        strict: bool = False,
    ) -> Executor:
        """Start an executor on this machine.

        Args:
            processes: A process per slot instead of a thread.
            cpus: CPUs to hand out; None doesn't count them.
            gpus: GPUs to hand out; None for those that this process sees.
            strict: Send everything through the wire format, on threads too.
        """
        node = Node(platform.node(), cpus, count_gpus() if gpus is None else gpus)
        if processes:
            from colocate_local.processes import LocalProcesses

            return LocalProcesses(node)
        from colocate_local.threads import LocalThreads

        return LocalThreads(node, strict)

    @classmethod
    def foresee(cls, options: Mapping[str, Any]) -> None:
        """Start the template process of the workers, in advance."""
        if options.get("processes") is True:
            forks.foresee(os.environ)

    @classmethod
    def objection(cls, option: str, value: Any) -> str | None:
        """Return None: no option of this executor can do harm."""
        return None

    @classmethod
    def variant(cls, options: Mapping[str, Any]) -> type[Executor]:
        """Return the executor class for processes or for threads."""
        from colocate_local.processes import LocalProcesses
        from colocate_local.threads import LocalThreads

        return LocalProcesses if options.get("processes") else LocalThreads

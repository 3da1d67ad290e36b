"""The embedded executor: which of its two variants the options choose; only that one is imported."""

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
        node = Node(platform.node(), cpus, count_gpus() if gpus is None else gpus)
        if processes:
            from colocate_local.processes import LocalProcesses

            return LocalProcesses(node)
        from colocate_local.threads import LocalThreads

        return LocalThreads(node, strict)

    @classmethod
    def foresee(cls, options: Mapping[str, Any]) -> None:
        """Have the template of the workers started."""
        if options.get("processes") is True:
            forks.foresee(os.environ)

    @classmethod
    def objection(cls, option: str, value: Any) -> str | None:
        """Return None: the options count and choose, and name nothing."""
        return None

    @classmethod
    def variant(cls, options: Mapping[str, Any]) -> type[Executor]:
        """The class for slots that are processes, or threads."""
        from colocate_local.processes import LocalProcesses
        from colocate_local.threads import LocalThreads

        return LocalProcesses if options.get("processes") else LocalThreads

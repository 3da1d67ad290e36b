"""The entry class of the local executor, which imports only the variant that the options choose."""

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
    """The local executor: each slot is a thread of the driver, or with `processes=True` a process."""

    @classmethod
    def connect(  # type: ignore[override]  # the signature shows users the options
        cls,
        *,
        processes: bool = False,
        cpus: float | None = None,
        gpus: int | None = None,
        strict: bool = False,
    ) -> Executor:
        """Create a local executor.

        Args:
            processes: Whether each slot is a process instead of a thread.
            cpus: Number of CPUs for slots; None doesn't count CPUs.
            gpus: Number of GPUs for slots; None for all GPUs that this process sees.
            strict: Whether all values pass through the wire format, even between threads.
        """
        node = Node(platform.node(), cpus, count_gpus() if gpus is None else gpus)
        if processes:
            from colocate_local.processes import LocalProcesses

            return LocalProcesses(node)
        from colocate_local.threads import LocalThreads

        return LocalThreads(node, strict)

    @classmethod
    def foresee(cls, options: Mapping[str, Any]) -> None:
        """Start the workers' template process before the executor is needed."""
        if options.get("processes") is True:
            forks.prepare_template(os.environ)

    @classmethod
    def objection(cls, option: str, value: Any) -> str | None:
        """Accept every option of a config, because no option of this executor can do harm."""
        return None

    @classmethod
    def variant(cls, options: Mapping[str, Any]) -> type[Executor]:
        """Return the executor class for processes or for threads, as the options choose."""
        from colocate_local.processes import LocalProcesses
        from colocate_local.threads import LocalThreads

        return LocalProcesses if options.get("processes") else LocalThreads

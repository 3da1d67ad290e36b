"""The Ray actor that owns the slots of one detachable pool. The actor can outlive the driver.

In Ray a placement group and its actors end with the process that made them, so a pool that outlives drivers needs an
owner. The owner holds the pool's lead keeper, which has no workers. The driver's connection to this keeper ties the
pool to the driver until the pool is detached. When the lead keeper ends, the owner frees all slots and exits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import ray

import colocate
from colocate.errors import ColocateError
from colocate.executor import Request
from colocate.keeper import Keeper, describe_mismatch, die_with
from colocate_ray import names
from colocate_ray.placing import Placing
from colocate_ray.proxy import Failure
from colocate_ray.terms import Cluster, Slot, tls_of_environment

# A driver connects right after the start. If the driver dies before connecting, only this timeout ends the owner.
_DIALLED_WITHIN_S = 10.0
_NUMBER = 1  # An owner has only one reservation, with this number.


class Owner:
    """The Ray actor that owns the slots of one pool."""

    def __init__(self) -> None:
        """Set fields only, because Ray would report an error of the constructor merely as text."""
        self._keeper: Keeper | None = None
        self._placing: Placing | None = None
        self._name = ""
        self._ending = threading.Lock()

    def open(self, version: str, key: bytes, name: str, cluster: Cluster, request: Request) -> str | Failure:
        """Start the lead keeper and return the keeper's address, or return a Failure.

        A Failure means that the colocate versions differ, or that no port or descriptor is free.
        """
        if (words := describe_mismatch({"colocate": version}, {"colocate": colocate.__version__})) is not None:
            return Failure(ColocateError, f"the Python that Ray runs in the cluster {words}", {})
        die_with(os.getppid())  # Without this call a killed raylet would leave this process behind.
        self._name = name
        self._placing = Placing(cluster, lambda *lost: None)
        address_of_node: Callable[[], str] = ray.util.get_node_ip_address
        try:
            self._keeper = Keeper(
                key,
                host=address_of_node(),
                ports=request.ports,
                cut_s=request.cut_s,
                tls=tls_of_environment(),
                detachable=True,
                dialled_within_s=_DIALLED_WITHIN_S,
                on_end=self._on_keeper_ended,
            )
        except OSError as error:  # There is no free port or no free descriptor.
            return Failure(ColocateError, f"the Ray actor that is to own the pool has no keeper: {error}", {})
        return self._keeper.address

    def reserve(self, key: bytes, request: Request) -> list[Slot]:
        """Hold slots for the pool, as `Placing.reserve` does for a driver."""
        assert self._placing is not None
        return self._placing.reserve(_NUMBER, request, key)

    def end_slot(self, index: int) -> None:
        """Kill the process of the keeper on a slot, as `Placing.end_slot` does for a driver."""
        assert self._placing is not None
        self._placing.end_slot(_NUMBER, index)

    def release(self) -> None:
        """Free all slots, and wait until the slots can be reserved again."""
        with self._ending:
            names.unpublish(self._name)
            if self._placing is not None:
                self._placing.release(_NUMBER)
                self._placing.end_all()

    def _on_keeper_ended(self) -> None:
        """Free the slots and exit, because the lead keeper has ended. Runs on a thread of the keeper."""
        try:
            self.release()
        finally:
            os._exit(0)

"""Who owns a pool that may be detached: a Ray actor of its own, which outlives drivers. Nothing else does that in Ray.

A placement group and the actors in it belong to the process that made them, and go with it. So the owner makes them
for its one pool. It holds the pool's lead keeper, which has no workers: the driver's connection to that one is what
ties the pool to the driver until it is detached. When that keeper ends, the owner gives everything back, and goes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import ray

import colocate
from colocate.errors import ColocateError
from colocate.executor import Request
from colocate.keeper import Keeper, die_with, difference
from colocate_ray import names
from colocate_ray.placing import Placing
from colocate_ray.proxy import Failure
from colocate_ray.terms import Cluster, Slot, tls_of_environment

# Who has it made dials at once. If that one goes before, nothing else would end it.
_DIALLED_WITHIN_S = 10.0
_NUMBER = 1  # of its one reservation


class Owner:
    """One per pool."""

    def __init__(self) -> None:
        """Nothing that could fail: what a constructor raises reaches nobody but as text."""
        self._keeper: Keeper | None = None
        self._placing: Placing | None = None
        self._name = ""
        self._ending = threading.Lock()

    def open(self, version: str, key: bytes, name: str, cluster: Cluster, request: Request) -> str | Failure:
        """Make the keeper; return its address, or an error when the version is another, or it can't listen."""
        if (words := difference({"colocate": version}, {"colocate": colocate.__version__})) is not None:
            return Failure(ColocateError, f"the Python that Ray runs in the cluster {words}", {})
        die_with(os.getppid())  # a raylet that is killed would leave it behind
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
                on_end=self._leave,
            )
        except OSError as error:  # no port is free, or no descriptor
            return Failure(ColocateError, f"the Ray actor that is to own the pool has no keeper: {error}", {})
        return self._keeper.address

    def reserve(self, key: bytes, request: Request) -> list[Slot]:
        """As `Placing.reserve`."""
        assert self._placing is not None
        return self._placing.reserve(_NUMBER, request, key)

    def end_slot(self, index: int) -> None:
        """As `Placing.end_slot`."""
        assert self._placing is not None
        self._placing.end_slot(_NUMBER, index)

    def release(self) -> None:
        """Give everything back; when this returns it can be reserved again."""
        with self._ending:
            names.forget(self._name)
            if self._placing is not None:
                self._placing.release(_NUMBER)
                self._placing.end()

    def _leave(self) -> None:
        """End what the owner holds: its keeper has ended. On a thread of that one's."""
        try:
            self.release()
        finally:
            os._exit(0)

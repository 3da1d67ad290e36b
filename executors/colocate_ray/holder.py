"""The Ray actor that holds all keepers of a driver on one machine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import psutil
import ray

import colocate
from colocate.executor import Request
from colocate.gpus import SHOWING
from colocate.keeper import Keeper, describe_mismatch, die_with, readable
from colocate.wire import LOOPBACK
from colocate_ray.nodes import natural_key
from colocate_ray.terms import Cluster, tls_of_environment

_BELOW_ENDS_WITHIN_S = 5.0
_NOT_SET_BY_RAY = {f"RAY_EXPERIMENTAL_NOSET_{name}": name for name in SHOWING}


@attrs.frozen
class Gpus:
    """The GPUs of one slot, with the environment variables that select these GPUs."""

    names: tuple[str, ...] = ()  # Ray's names of the GPUs, in the order of ranks.
    env: Mapping[str, str] = attrs.field(factory=dict)  # Variables that make exactly these GPUs visible to workers.


def read_gpus(cluster: Cluster) -> Gpus:
    """Return the GPUs of the bundle in which this Ray task runs."""
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
    names = _sort_gpus(ids, cluster.gpus or ())
    return Gpus(tuple(names), _visibility_variables(names))


class Holder:
    """The Ray actor that holds the keepers of a driver, or of an owner, on one machine. Runs no role code.

    All workers of a holder are forks of one template process, which is a child of the holder.
    """

    def __init__(self) -> None:
        """Set fields only, because Ray would report an error of the constructor merely as text."""
        self._keepers: dict[int, list[Keeper]] = {}
        self._ended_numbers: set[int] = (
            set()
        )  # Numbers of ended reservations. A reservation may end before `open` is called.
        self._lock = threading.Lock()

    def open(
        self, version: str, number: int, key: bytes, request: Request, slots: Mapping[int, Gpus], cluster: Cluster
    ) -> dict[str, Any] | str:
        """Start keepers for a reservation's slots on this machine, and return their addresses or an error text."""
        if (words := describe_mismatch({"colocate": version}, {"colocate": colocate.__version__})) is not None:
            return f"it {words}"
        die_with(os.getppid())  # Without this call a killed raylet would leave this process behind.
        # Ray sets this variable for actors without CPUs, but workers need another value.
        os.environ.pop("OMP_NUM_THREADS", None)
        address_of_node: Callable[[], str] = ray.util.get_node_ip_address
        host = None if cluster.private else address_of_node()
        tls = None if cluster.private else tls_of_environment()
        with self._lock:
            if number in self._ended_numbers:
                return "the reservation was withdrawn"
            keepers = self._keepers.setdefault(number, [])
            made_keepers = []
            for gpus in slots.values():
                env = {**gpus.env, **request.env}
                try:
                    keeper = Keeper(
                        key,
                        host=host,
                        ports=request.ports,
                        cut_s=request.cut_s,
                        env=env,
                        tls=tls,
                        name=request.id,
                        detachable=request.detachable,
                    )
                except OSError as error:  # There is no free port or no free descriptor.
                    return str(error)
                keepers.append(keeper)
                made_keepers.append(keeper)
        return {
            "process": (os.getpid(), psutil.Process().create_time()),
            "host": host or LOOPBACK,
            "addresses": {index: keeper.address for index, keeper in zip(slots, made_keepers, strict=True)},
        }

    @ray.method(concurrency_group="ends")
    def end(self, number: int) -> None:
        """End the keepers of a reservation, and wait until all of their processes are gone."""
        with self._lock:
            self._ended_numbers.add(number)
            keepers = self._keepers.pop(number, [])
        for keeper in keepers:
            keeper.close()

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Block for ever, so that Ray reports the end of this call as soon as the actor ends."""
        threading.Event().wait()


def _sort_gpus(some: Iterable[object], gpus: Sequence[str]) -> list[str]:
    """Return the GPUs, which Ray lists unordered, sorted by position in `gpus`, then by number."""
    return sorted(map(str, some), key=lambda name: (gpus.index(name) if name in gpus else len(gpus), natural_key(name)))


def _visibility_variables(gpus: list[str]) -> dict[str, str]:
    """Return the variables that make only the slot's GPUs visible to workers. Ray may not have set these variables."""
    by_ray = {variable for variable in _NOT_SET_BY_RAY.values() if _has_all_names(os.environ.get(variable, ""), gpus)}
    variables = {variable for flag, variable in _NOT_SET_BY_RAY.items() if flag in os.environ}
    return dict.fromkeys(by_ray | variables, ",".join(gpus)) if gpus else {}


def _has_all_names(text: str, gpus: list[str]) -> bool:
    return sorted(text.split(",")) == sorted(gpus)


def end_process(pid: int, created: float | None) -> None:
    """Kill the unresponsive process of an actor on this machine, because Ray's own kill may be only a request.

    Also waits for the descendants of the process, which end a moment later.
    """
    try:
        process = psutil.Process(pid)
        if not process.cmdline()[0].startswith("ray::") if created is None else process.create_time() != created:
            return
        with contextlib.ExitStack() as ends:
            below = [_open_pidfd(child.pid, ends) for child in process.children(recursive=True)]
            process.kill()
            process.wait()
            deadline = time.monotonic() + _BELOW_ENDS_WITHIN_S
            for descriptor in filter(None, below):
                readable(descriptor, max(0.0, deadline - time.monotonic()))
    except psutil.NoSuchProcess:
        return


def _open_pidfd(pid: int, ends: contextlib.ExitStack) -> int | None:
    """Return a descriptor that becomes readable when a process ends; None if the process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    ends.callback(os.close, descriptor)
    return descriptor

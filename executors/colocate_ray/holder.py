"""The Ray actor of a machine: it holds keepers, and nothing else happens in it."""

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
from colocate.keeper import Keeper, die_with, difference, readable
from colocate.wire import LOOPBACK
from colocate_ray.nodes import natural
from colocate_ray.terms import Cluster, tls_of_environment

_BELOW_ENDS_WITHIN_S = 5.0
_NOT_SET_BY_RAY = {f"RAY_EXPERIMENTAL_NOSET_{name}": name for name in SHOWING}


@attrs.frozen
class Gpus:
    """The GPUs of one slot."""

    names: tuple[str, ...] = ()  # as Ray calls them, in the order of the ranks
    env: Mapping[str, str] = attrs.field(factory=dict)  # what shows them, and no others, to its workers


def gpus_here(cluster: Cluster) -> Gpus:
    """Return the GPUs that Ray has given to the bundle in which this runs, as a task."""
    found = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
    names = _in_order(found, cluster.gpus or ())
    return Gpus(tuple(names), _shown(names))


class Holder:
    """An actor on each machine for a driver, or for an owner. Roles don't run in its process but in the workers.

    They are forks of one template, its child, whatever reservation they belong to.
    """

    def __init__(self) -> None:
        """Nothing that could fail: what a constructor raises reaches nobody but as text."""
        self._keepers: dict[int, list[Keeper]] = {}
        self._ended: set[int] = set()  # perhaps before they were opened
        self._lock = threading.Lock()

    def open(
        self, version: str, number: int, key: bytes, request: Request, slots: Mapping[int, Gpus], cluster: Cluster
    ) -> dict[str, Any] | str:
        """Make the keepers of a reservation's slots on this machine; say where they are, or why they can't be."""
        if (words := difference({"colocate": version}, {"colocate": colocate.__version__})) is not None:
            return f"it {words}"
        die_with(os.getppid())  # a raylet that is killed would leave it behind
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's guess for an actor without CPUs of its own
        address_of_node: Callable[[], str] = ray.util.get_node_ip_address
        host = None if cluster.private else address_of_node()
        tls = None if cluster.private else tls_of_environment()
        with self._lock:
            if number in self._ended:
                return "the reservation was withdrawn"
            keepers = self._keepers.setdefault(number, [])
            made = []
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
                except OSError as error:  # no port is free, or no descriptor
                    return str(error)
                keepers.append(keeper)
                made.append(keeper)
        return {
            "process": (os.getpid(), psutil.Process().create_time()),
            "host": host or LOOPBACK,
            "addresses": {index: keeper.address for index, keeper in zip(slots, made, strict=True)},
        }

    @ray.method(concurrency_group="ends")
    def end(self, number: int) -> None:
        """End the keepers of a reservation; nothing of theirs is left when this returns."""
        with self._lock:
            self._ended.add(number)
            keepers = self._keepers.pop(number, [])
        for keeper in keepers:
            keeper.close()

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns: what ends this call is the end of the actor, of which Ray tells at once."""
        threading.Event().wait()


def _in_order(some: Iterable[object], gpus: Sequence[str]) -> list[str]:
    """Some GPUs, which Ray has in no order: as in a list of them, or by their numbers."""
    return sorted(map(str, some), key=lambda name: (gpus.index(name) if name in gpus else len(gpus), natural(name)))


def _shown(gpus: list[str]) -> dict[str, str]:
    """Return what shows the slot's GPUs alone to its workers, in order; Ray may have been told not to show them."""
    by_ray = {variable for variable in _NOT_SET_BY_RAY.values() if _names_all(os.environ.get(variable, ""), gpus)}
    left = {variable for flag, variable in _NOT_SET_BY_RAY.items() if flag in os.environ}
    return dict.fromkeys(by_ray | left, ",".join(gpus)) if gpus else {}


def _names_all(text: str, gpus: list[str]) -> bool:
    return sorted(text.split(",")) == sorted(gpus)


def end_process(pid: int, created: float | None) -> None:
    """End the process of an actor that doesn't answer, on its machine. Ray itself asks kindly, and may do no more.

    What is below it ends with it, a moment later; that is waited for too.
    """
    try:
        process = psutil.Process(pid)
        if not process.cmdline()[0].startswith("ray::") if created is None else process.create_time() != created:
            return
        with contextlib.ExitStack() as ends:
            below = [_held(each.pid, ends) for each in process.children(recursive=True)]
            process.kill()
            process.wait()
            deadline = time.monotonic() + _BELOW_ENDS_WITHIN_S
            for descriptor in filter(None, below):
                readable(descriptor, max(0.0, deadline - time.monotonic()))
    except psutil.NoSuchProcess:
        return


def _held(pid: int, ends: contextlib.ExitStack) -> int | None:
    """A descriptor that can be read when a process has ended; None when it has."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    ends.callback(os.close, descriptor)
    return descriptor

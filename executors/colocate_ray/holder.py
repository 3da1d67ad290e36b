"""The Ray actor of a slot: it holds a keeper, and nothing else happens in it."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import psutil
import ray

import colocate
from colocate.executor import Request
from colocate.gpus import indices
from colocate.keeper import Keeper, die_with
from colocate.wire import LOOPBACK
from colocate_ray.certificates import tls_of_environment
from colocate_ray.nodes import natural
from colocate_ray.terms import Cluster

_BELOW_ENDS_WITHIN_S = 5.0
_NOT_SET_BY_RAY = {
    f"RAY_EXPERIMENTAL_NOSET_{name}": name
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
}


class Holder:
    """One per slot. Roles don't run in its process but in the workers that its keeper starts."""

    def __init__(self) -> None:
        """Nothing that could fail: what a constructor raises reaches nobody but as text."""
        self._keeper: Keeper | None = None

    def open(self, version: str, key: bytes, request: Request, cluster: Cluster) -> dict[str, Any] | str:
        """Make the keeper.

        Args:
            version: The driver's version of colocate.
            key: The key of the driver's keepers.
            request: What the slot was reserved by.
            cluster: Which Ray this is.

        Returns:
            Where it is; or, as text, why it can't be.
        """
        if version != colocate.__version__:
            return f"it has colocate {colocate.__version__}, the driver has {version}; install the same on all"
        die_with(os.getppid())  # a raylet that is killed would leave it behind
        if not request.cpus:
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray's guess for an actor without CPUs of its own
        address_of_node: Callable[[], str] = ray.util.get_node_ip_address
        host = None if cluster.private else address_of_node()
        tls = None if cluster.private else tls_of_environment()
        end = partial(os._exit, 0)
        context = ray.get_runtime_context()
        gpus = _in_order(context.get_accelerator_ids().get("GPU", ()), cluster.gpus or ())
        env = {**_shown(gpus), **request.env}
        self._keeper = Keeper(
            key, host=host, env=env, tls=tls, name=request.id, detachable=request.detachable, on_end=end
        )
        return {
            "node": context.get_node_id(),
            "process": (os.getpid(), psutil.Process().create_time()),
            "devices": indices(gpus, cluster.gpus or ()),
            "host": host or LOOPBACK,
            "address": self._keeper.address,
        }

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns: what ends this call is the end of the actor, of which Ray tells at once."""
        threading.Event().wait()


def _in_order(some: Iterable[object], gpus: Sequence[str]) -> list[str]:
    """Some GPUs, which Ray has in no order: as in a list of them, or by their numbers."""
    return sorted(map(str, some), key=lambda name: (gpus.index(name) if name in gpus else len(gpus), natural(name)))


def _shown(gpus: list[str]) -> dict[str, str]:
    """What shows the slot's GPUs, and no others, to its workers, in order; Ray may have been told not to show them."""
    by_ray = {variable for variable in _NOT_SET_BY_RAY.values() if _names_all(os.environ.get(variable, ""), gpus)}
    left = {variable for flag, variable in _NOT_SET_BY_RAY.items() if flag in os.environ}
    return dict.fromkeys(by_ray | left, ",".join(gpus)) if gpus else {}


def _names_all(text: str, gpus: list[str]) -> bool:
    return sorted(text.split(",")) == sorted(gpus)


def end_process(pid: int, created: float) -> None:
    """End the process of a holder that doesn't answer, on its machine. Ray itself asks kindly, for seconds.

    What is below it ends with it, a moment later; that is waited for too.
    """
    try:
        process = psutil.Process(pid)
        if process.create_time() != created:
            return
        with contextlib.ExitStack() as ends:
            below = [_held(each.pid, ends) for each in process.children(recursive=True)]
            process.kill()
            process.wait()
            deadline = time.monotonic() + _BELOW_ENDS_WITHIN_S
            for descriptor in filter(None, below):
                select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
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

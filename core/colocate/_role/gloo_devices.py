"""Gloo groups of one process on one device: what serves their connections, a thread."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def on_one_device(c10d: Any) -> Iterator[None]:
    """Have gloo groups share the thread that does what comes on their connections, which torch gives each of its own.

    Where processors are few, its waking up is what a collective mostly waits for: with a group for each of two models
    under FSDP2, whose collectives alternate, a step of training took 8 % longer (torch 2.13, two ranks on two cores).
    """
    # Torch passes no options on to gloo: so the class that it calls is another one meanwhile.
    gloo = getattr(c10d, "ProcessGroupGloo", None)  # not in every torch
    if gloo is None or issubclass(gloo, _sharing()):  # another thread is at it
        yield
        return
    c10d.ProcessGroupGloo = _sharing()
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = gloo


@functools.cache
def _sharing() -> Any:
    """Gloo's groups as torch's constructor makes them, but for their devices."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo

    class Sharing(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta, **more: Any) -> None:
            options = _options(gloo, timeout, more)
            if options is None:  # a torch that makes them in another way: they have threads of their own
                super().__init__(store, rank, size, timeout, **more)
            else:
                super().__init__(store, rank, size, options)

    return Sharing


def _options(gloo: Any, timeout: datetime.timedelta, more: dict[str, Any]) -> Any:
    """As torch's own constructor makes them of its arguments; None where that isn't known."""
    try:
        options = gloo._Options()
        options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = 2 * len(options._devices)
        options._timeout = timeout
        for name, value in more.items():  # from torch 2.14 on there is one
            if value != getattr(options, name):
                setattr(options, name, value)
    except AttributeError:
        return None
    return options


@functools.cache
def _devices(interfaces: str) -> list[Any]:
    """Those of this process. Each has a thread."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=each) for each in interfaces.split(",")]

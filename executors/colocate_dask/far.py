"""What runs in the Dask worker that holds a slot: it says what it is, and places the keeper there.

Role code doesn't run here but in a process of the keeper's, so nothing has to be unloaded when a slot is given back.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import psutil

import colocate
from colocate import gpus
from colocate.errors import ConfigError
from colocate.keeper import Keeper, Thread
from colocate.wire import Tls
from colocate_dask.offers import Facts

TOPIC = (
    "colocate"  # of the events of Dask's that tell drivers of lost workers, and the scheduler of pools that are over
)

_REMEMBERED = 100


@attrs.frozen
class Plan:
    """How to make one keeper."""

    reservation: str  # whose it is
    grant: str  # the id of its slot's grant
    key: bytes = attrs.field(repr=False)  # the driver's secret
    host: str | None  # address under which other machines reach this one; None when they needn't
    env: Mapping[str, str]  # environment of its workers
    encrypted: bool = False  # whether it talks with other machines by TLS, with the Dask worker's own certificates
    label: str = ""  # the reservation's name among those of all drivers (`Request.id`)
    detachable: bool = False  # whether other drivers may follow this one
    ports: tuple[int, int] | None = None  # the first and the last that it may listen on; None for any
    cut_s: float | None = None


@attrs.define(eq=False)
class _OnWorker:
    """The keepers of one Dask worker, by grant, and the grants that are over."""

    keepers: dict[str, Keeper] = attrs.field(factory=dict)
    over: list[str] = attrs.field(factory=list)


_on_workers: weakref.WeakKeyDictionary[Any, _OnWorker] = weakref.WeakKeyDictionary()


def describe(dask_worker: Any = None) -> Facts:
    """Return what this process is."""
    python = ".".join(platform.python_version_tuple()[:2])
    lifetime = getattr(dask_worker, "lifetime", None)  # since it was made, which was soon after its process began
    retires = psutil.Process().create_time() + lifetime if lifetime else None
    return Facts(python, colocate.__version__, gpus.listed(), "dask_cuda" in sys.modules, retires)


async def start(plans: Mapping[str, Plan], dask_worker: Any) -> str:
    """Make the keeper that is planned for this worker (`plans`: by address); return its address."""
    plan = plans[dask_worker.address]
    here = _on_workers.setdefault(dask_worker, _OnWorker())
    for grant in list(here.keepers):  # the scheduler has freed the slot, so nobody has a right to it
        await end(grant, dask_worker)
    if plan.grant in here.over:
        raise RuntimeError(f"reservation {plan.reservation} is over: its driver has gone")

    def forget() -> None:
        here.keepers.pop(plan.grant, None)
        if plan.detachable:  # with the driver, a detached pool may have no other way to say that it is over
            dask_worker.loop.add_callback(dask_worker.log_event, TOPIC, {"over": plan.reservation})

    tls = tls_of(dask_worker.security, "worker") if plan.encrypted else None
    keeper = Keeper(
        plan.key,
        host=plan.host,
        ports=plan.ports,
        cut_s=plan.cut_s,
        env=plan.env,
        tls=tls,
        name=plan.label,
        detachable=plan.detachable,
        on_end=forget,
    )
    here.keepers[plan.grant] = keeper
    return keeper.address


async def end(grant: str, dask_worker: Any) -> None:
    """End the keeper of a grant, now or when it should come yet; returns when its worker is gone."""
    here = _on_workers.setdefault(dask_worker, _OnWorker())
    here.over = [*here.over, grant][-_REMEMBERED:]
    if (keeper := here.keepers.pop(grant, None)) is not None:
        await _on_a_thread(keeper)


async def _on_a_thread(keeper: Keeper) -> None:
    """Close a keeper without stopping Dask's loop. Not by an executor of the loop's: at exit those start nothing."""
    loop = asyncio.get_running_loop()
    closed = loop.create_future()

    def close() -> None:
        try:
            keeper.close()
        finally:
            loop.call_soon_threadsafe(closed.set_result, None)

    try:
        Thread(target=close, name="colocate-keeper-close").start()
    except RuntimeError:  # no thread is to be had: Dask's loop does stop, for as long as the workers take to end
        close()
    await closed


def kill(dask_worker: Any) -> None:
    """End the process of a worker that doesn't answer. Runs in its nanny, which Dask gives as `dask_worker`."""
    if dask_worker.pid:
        os.kill(dask_worker.pid, signal.SIGKILL)


def tls_of(security: Any, side: str) -> Tls:
    """Return what one side, "client" or "worker", proves itself with.

    Raises:
        ConfigError: It lacks something. (It must not go on in clear text.)
        OSError: A file can't be read.
    """
    names = ["tls_ca_file", f"tls_{side}_cert", f"tls_{side}_key"]
    parts = [getattr(security, name) for name in names]
    missing = [name for name, part in zip(names, parts, strict=True) if part is None]
    if missing:
        raise ConfigError(f"the Dask cluster uses tls://, but the {side}'s security lacks {', '.join(missing)}")
    return Tls(*map(_text, parts))


def _text(part: str) -> str:
    """PEM text, which Dask takes as it is or as the path of a file."""
    return part if "\n" in part else Path(part).read_text()

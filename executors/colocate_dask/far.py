"""Code that runs in the Dask worker of a slot: a description of the process, and the start of the keeper.

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

TOPIC = "colocate"  # Topic of Dask events: lost workers, for drivers, and ended pools, for the scheduler

_REMEMBERED = 100


@attrs.frozen
class Plan:
    """The settings with which a Dask worker starts one keeper."""

    reservation: str  # id of the reservation
    grant: str  # id of the slot's grant
    key: bytes = attrs.field(repr=False)  # the driver's secret
    host: str | None  # address of this machine for other machines; None if no other machine connects
    env: Mapping[str, str]  # environment of the workers
    encrypted: bool = False  # whether TLS with the Dask worker's own certificates protects traffic between machines
    label: str = ""  # the reservation's name, unique among all drivers (`Request.id`)
    detachable: bool = False  # whether other drivers may adopt the pool
    ports: tuple[int, int] | None = None  # the first and the last port to listen on; None for any
    cut_s: float | None = None


@attrs.define(eq=False)
class _OnWorker:
    """The keepers of one Dask worker, by grant, and the grants that have ended."""

    keepers: dict[str, Keeper] = attrs.field(factory=dict)
    over: list[str] = attrs.field(factory=list)


_on_workers: weakref.WeakKeyDictionary[Any, _OnWorker] = weakref.WeakKeyDictionary()


def describe(dask_worker: Any = None) -> Facts:
    """Return the versions, GPUs and time of retirement of this process."""
    python = ".".join(platform.python_version_tuple()[:2])
    # seconds since the worker was made, shortly after the start of the process
    lifetime = getattr(dask_worker, "lifetime", None)
    retires = psutil.Process().create_time() + lifetime if lifetime else None
    return Facts(python, colocate.__version__, gpus.listed(), "dask_cuda" in sys.modules, retires)


async def start(plans: Mapping[str, Plan], dask_worker: Any) -> str:
    """Start this worker's keeper from `plans` (by address); return the keeper's address."""
    plan = plans[dask_worker.address]
    state = _on_workers.setdefault(dask_worker, _OnWorker())
    for grant in list(state.keepers):  # the scheduler has freed the slot, so an older keeper is a leftover
        await end(grant, dask_worker)
    if plan.grant in state.over:
        raise RuntimeError(f"reservation {plan.reservation} is over: its driver has gone")

    def forget() -> None:
        state.keepers.pop(plan.grant, None)
        # once the driver is gone, this event is the only way to tell the scheduler of the pool's end
        if plan.detachable:
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
    state.keepers[plan.grant] = keeper
    return keeper.address


async def end(grant: str, dask_worker: Any) -> None:
    """End the keeper of a grant, or prevent a later start; return when the keeper's worker is gone."""
    state = _on_workers.setdefault(dask_worker, _OnWorker())
    state.over = [*state.over, grant][-_REMEMBERED:]
    if (keeper := state.keepers.pop(grant, None)) is not None:
        await _on_a_thread(keeper)


async def _on_a_thread(keeper: Keeper) -> None:
    """Close a keeper without blocking Dask's loop. A plain thread: at exit the loop's executor starts nothing."""
    loop = asyncio.get_running_loop()
    closed = loop.create_future()

    def close() -> None:
        try:
            keeper.close()
        finally:
            loop.call_soon_threadsafe(closed.set_result, None)

    try:
        Thread(target=close, name="colocate-keeper-close").start()
    except RuntimeError:  # no thread could be started, so Dask's loop blocks until the workers have ended
        close()
    await closed


def kill(dask_worker: Any) -> None:
    """Kill the process of a worker that doesn't answer. Runs in the nanny, which Dask passes as `dask_worker`."""
    if dask_worker.pid:
        os.kill(dask_worker.pid, signal.SIGKILL)


def tls_of(security: Any, side: str) -> Tls:
    """Return the certificates of one side, "client" or "worker".

    Raises:
        ConfigError: A certificate or key is missing. (The connection must not fall back to clear text.)
        OSError: A file can't be read.
    """
    names = ["tls_ca_file", f"tls_{side}_cert", f"tls_{side}_key"]
    parts = [getattr(security, name) for name in names]
    missing = [name for name, part in zip(names, parts, strict=True) if part is None]
    if missing:
        raise ConfigError(f"the Dask cluster uses tls://, but the {side}'s security lacks {', '.join(missing)}")
    return Tls(*map(_text, parts))


def _text(part: str) -> str:
    """Return PEM text; Dask accepts the text or the path of a file."""
    return part if "\n" in part else Path(part).read_text()

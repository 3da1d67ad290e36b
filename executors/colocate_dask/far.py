"""Functions that run in a slot's Dask worker, to describe the process and to start and end the keeper.

Role code runs in processes that the keeper starts, so a released slot leaves no role code in the Dask worker.
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

TOPIC = "colocate"  # Dask events on this topic notify drivers of lost workers, and the scheduler of ended pools.

_REMEMBERED = 100


@attrs.frozen
class Plan:
    """The settings with which a Dask worker starts one keeper."""

    reservation: str  # Id of the reservation.
    grant: str  # Id of the slot's grant (`Grant.id`).
    key: bytes = attrs.field(repr=False)  # The secret that the driver shares with the keeper.
    host: str | None  # Address of this machine for other machines; None if no other machine connects.
    env: Mapping[str, str]  # Environment variables of the workers that the keeper starts.
    encrypted: bool = False  # Whether TLS with the Dask worker's own certificates protects traffic between machines.
    label: str = ""  # The reservation's name, unique among all drivers (`Request.id`).
    detachable: bool = False  # Whether other drivers may adopt the pool.
    ports: tuple[int, int] | None = None  # The first and the last port to listen on; None for any port.
    cut_s: float | None = None


@attrs.define(eq=False)
class _WorkerKeepers:
    """The state of one Dask worker: the keepers by grant id, and the ids of recently ended grants."""

    keepers: dict[str, Keeper] = attrs.field(factory=dict)
    ended_grants: list[str] = attrs.field(factory=list)


_on_workers: weakref.WeakKeyDictionary[Any, _WorkerKeepers] = weakref.WeakKeyDictionary()


def describe(dask_worker: Any = None) -> Facts:
    """Return the facts about this process: versions, visible GPUs, and the time of a planned end."""
    python = ".".join(platform.python_version_tuple()[:2])
    # `lifetime` counts from the worker's creation, which is shortly after the start of the process.
    lifetime = getattr(dask_worker, "lifetime", None)
    retires = psutil.Process().create_time() + lifetime if lifetime else None
    return Facts(python, colocate.__version__, gpus.list_visible_gpus(), "dask_cuda" in sys.modules, retires)


async def start_keeper(plans: Mapping[str, Plan], dask_worker: Any) -> str:
    """Start the keeper for this Dask worker and return the keeper's address.

    `plans` has a plan for each Dask worker, by address.
    """
    plan = plans[dask_worker.address]
    state = _on_workers.setdefault(dask_worker, _WorkerKeepers())
    for grant in list(state.keepers):  # An older keeper is a leftover, because the scheduler has freed the slot since.
        await end_keeper(grant, dask_worker)
    if plan.grant in state.ended_grants:
        raise RuntimeError(f"reservation {plan.reservation} is over: its driver has gone")

    def forget() -> None:
        state.keepers.pop(plan.grant, None)
        # After the driver's exit, only this event notifies the scheduler of the pool's end.
        if plan.detachable:
            dask_worker.loop.add_callback(dask_worker.log_event, TOPIC, {"over": plan.reservation})

    tls = make_tls(dask_worker.security, "worker") if plan.encrypted else None
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


async def end_keeper(grant: str, dask_worker: Any) -> None:
    """End the keeper of a grant and wait until the keeper's workers have exited. Also prevents a later start."""
    state = _on_workers.setdefault(dask_worker, _WorkerKeepers())
    state.ended_grants = [*state.ended_grants, grant][-_REMEMBERED:]
    if (keeper := state.keepers.pop(grant, None)) is not None:
        await _close_on_thread(keeper)


async def _close_on_thread(keeper: Keeper) -> None:
    """Close a keeper on a new thread, so that Dask's event loop isn't blocked.

    At interpreter exit the event loop's own executor starts no threads any more.
    """
    loop = asyncio.get_running_loop()
    closed = loop.create_future()

    def close() -> None:
        try:
            keeper.close()
        finally:
            loop.call_soon_threadsafe(closed.set_result, None)

    try:
        Thread(target=close, name="colocate-keeper-close").start()
    except RuntimeError:  # If no thread can be started, Dask's event loop blocks until the workers have ended.
        close()
    await closed


def kill_worker(dask_worker: Any) -> None:
    """Kill the process of an unresponsive Dask worker. Runs in the worker's nanny, which Dask passes as argument."""
    if dask_worker.pid:
        os.kill(dask_worker.pid, signal.SIGKILL)


def make_tls(security: Any, side: str) -> Tls:
    """Return the TLS certificates in a Dask `Security` object for one side, "client" or "worker".

    Raises:
        ConfigError: A certificate or key is missing. The connection must not fall back to clear text.
        OSError: A file can't be read.
    """
    names = ["tls_ca_file", f"tls_{side}_cert", f"tls_{side}_key"]
    parts = [getattr(security, name) for name in names]
    missing = [name for name, part in zip(names, parts, strict=True) if part is None]
    if missing:
        raise ConfigError(f"the Dask cluster uses tls://, but the {side}'s security lacks {', '.join(missing)}")
    return Tls(*map(_read_pem, parts))


def _read_pem(part: str) -> str:
    """Return the PEM text of a certificate, which Dask accepts either as text or as the path of a file."""
    return part if "\n" in part else Path(part).read_text()

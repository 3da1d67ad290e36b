"""Whatever is used of `distributed` beyond its documentation; tests/dask/test_undocumented.py guards it.

What takes a client runs in drivers, the rest in the scheduler. The documented rest: `Client.run`, `run_on_scheduler`,
`register_plugin` and `subscribe_topic`, `SchedulerPlugin` and its hooks, `Scheduler.log_event`, the attributes of
`WorkerState`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections.abc import Callable, Mapping
from typing import Any

from distributed.comm.addressing import get_address_host_port
from distributed.protocol.pickle import dumps, loads
from distributed.protocol.serialize import Serialize, Serialized, deserialize, to_serialize

_OP = "colocate"


def ask_for_nothing(client: Any) -> None:
    """Have a client not ask every two seconds what workers there are: nobody here wants to know."""
    client._periodic_callbacks["scheduler-info"].stop()


def stream_of(client: Any) -> Any:
    """A client's stream to its scheduler: another one, when it has connected again."""
    return client.scheduler_comm


def sockets_of(client: Any) -> list[socket.socket]:
    """The sockets of a client's connections to its scheduler: of its stream, and of its pool."""
    stream = stream_of(client).comm if stream_of(client) is not None else None
    pools = [*client.rpc.available.values(), *client.rpc.occupied.values()]
    comms = [comm for comm in (stream, *(comm for pool in pools for comm in pool)) if comm is not None]
    streams = [getattr(comm, "stream", None) for comm in comms]  # one within a process has none, nor has a closed one
    return [stream.socket for stream in streams if stream is not None and stream.socket is not None]


async def asked(client: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Return what `Client.run_on_scheduler` does, of which the scheduler logs nothing; it `answers`."""
    pack: Callable[[Any], bytes] = dumps
    return (await getattr(client.scheduler, _OP)(function=pack(function), args=pack(args)))["result"]


def answers(scheduler: Any) -> None:
    """Have a scheduler answer whoever is `asked`."""
    unpack: Callable[[bytes], Any] = loads
    wrapped: Callable[[Any], Any] = to_serialize

    async def answer(function: bytes, args: bytes) -> dict[str, Any]:
        found = unpack(function)(*unpack(args), dask_scheduler=scheduler)
        return {"result": wrapped(await found if inspect.isawaitable(found) else found)}

    scheduler.handlers[_OP] = answer


async def is_there(client: Any) -> None:
    """Have a client's scheduler answer, which it logs nothing of."""
    await client.scheduler.echo()


def close_surplus(client: Any) -> None:
    """Close a client's connections by which nothing is being asked, but for one; its pool keeps all of them."""
    for comms in client.rpc.available.values():
        for comm in list(comms)[1:]:
            comms.remove(comm)
            client.rpc.semaphore.release()
            comm.abort()


def plugin_of(scheduler: Any, name: str) -> Any:
    """A scheduler plugin by its name; None when it isn't registered."""
    return scheduler.plugins.get(name)


async def takes_connections(address: str, within_s: float) -> bool:
    """Whether what has an address takes connections there, which a busy one does; one within a process is there."""
    if not address.startswith(("tcp://", "tls://")):
        return True
    try:
        opening = asyncio.open_connection(*get_address_host_port(address))
        _, writer = await asyncio.wait_for(opening, within_s)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    with contextlib.suppress(OSError):  # a reset by the other side
        await writer.wait_closed()  # so that no socket is left when this is over
    return True


def pause(scheduler: Any, worker: str, reason: str) -> None:
    """Give a worker no more tasks. At once: it is the scheduler that gives them."""
    scheduler.handle_worker_status_change("paused", worker, reason)


def resume(scheduler: Any, worker: str, reason: str) -> None:
    """Give a worker tasks again, unless it is being closed."""
    if scheduler.workers[worker].status.name == "paused":
        scheduler.handle_worker_status_change("running", worker, reason)


def runs_again(msg: Any) -> bool:
    """Whether an event that is logged, with a worker's address as topic, says that this one is given tasks again."""
    return isinstance(msg, Mapping) and (msg.get("action"), msg.get("status")) == ("worker-status-change", "running")


def keep_busy(scheduler: Any, count: int) -> None:
    """Count something more, or less, for which the scheduler isn't idle, and so doesn't end itself (idle-timeout)."""
    scheduler._active_graph_updates += count


def follow_adaptive(scheduler: Any, shown: Callable[[int], int], told: Callable[[int], int]) -> None:
    """Have functions say how many workers adaptive clusters are to have, from what the scheduler itself says.

    Args:
        scheduler: The scheduler.
        shown: For the scheduler's own pages.
        told: For an adaptive cluster that asks.
    """
    own = scheduler.adaptive_target
    scheduler.adaptive_target = lambda target_duration=None: shown(own(target_duration))
    scheduler.handlers["adaptive_target"] = lambda target_duration=None: told(own(target_duration))


def has_tasks_to_place(scheduler: Any) -> bool:
    """Whether there are tasks that no worker has."""
    return bool(scheduler.queued or scheduler.unrunnable)


def is_starting(state: Any) -> bool:
    """Whether a worker has come, and has yet to say that it may be given tasks."""
    return bool(state.status.name == "init")


def is_running(state: Any) -> bool:
    """Whether a worker is given tasks."""
    return bool(state.status.name == "running")


async def call(
    scheduler: Any, worker: str, function: Callable[..., Any], *args: Any, within_s: float, nanny: bool = False
) -> Any:
    """Return what `Client.run` does, from the scheduler: run a function in a worker, or in its nanny.

    Raises:
        Exception: It raised (a RuntimeError with its words), or couldn't be run: in time, or at all.
    """
    message = {"op": "run", "function": dumps(function), "args": dumps(args), "kwargs": dumps({}), "wait": True}  # type: ignore[no-untyped-call]
    coming = scheduler.broadcast(msg=message, workers=[worker], nanny=nanny)
    answer = (await asyncio.wait_for(coming, within_s))[worker]
    if answer["status"] != "OK":
        raise RuntimeError(answer["exception_text"])
    return _value(answer["result"])


def _value(result: Any) -> Any:
    """The scheduler doesn't unpack what it passes on."""
    if isinstance(result, Serialized):
        return deserialize(result.header, result.frames)  # type: ignore[no-untyped-call]
    return result.data if isinstance(result, Serialize) else result

"""The undocumented parts of `distributed` that colocate uses.

`tests/dask/test_undocumented.py` checks that these parts still exist.

Functions that take a client run in drivers, the other functions in the scheduler. Used as documented: `Client.run`,
`run_on_scheduler`, `register_plugin` and `subscribe_topic`, `SchedulerPlugin` and its hooks, `Scheduler.log_event`, the
attributes of `WorkerState`.
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


def stop_polling(client: Any) -> None:
    """Stop a client from requesting the list of workers every two seconds, because no code here reads the list."""
    client._periodic_callbacks["scheduler-info"].stop()


def find_stream(client: Any) -> Any:
    """Return a client's stream to the scheduler, which is a new object after each reconnect."""
    return client.scheduler_comm


def find_sockets(client: Any) -> list[socket.socket]:
    """Return all sockets that connect a client with the scheduler: the stream's and the connection pool's."""
    stream = find_stream(client).comm if find_stream(client) is not None else None
    pools = [*client.rpc.available.values(), *client.rpc.occupied.values()]
    comms = [comm for comm in (stream, *(comm for pool in pools for comm in pool)) if comm is not None]
    # In-process and closed connections have no stream.
    streams = [getattr(comm, "stream", None) for comm in comms]
    return [stream.socket for stream in streams if stream is not None and stream.socket is not None]


async def run_on_scheduler(client: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in the scheduler, as `Client.run_on_scheduler` but without a log line.

    `add_handler` must have run in the scheduler.
    """
    pack: Callable[[Any], bytes] = dumps
    return (await getattr(client.scheduler, _OP)(function=pack(function), args=pack(args)))["result"]


def add_handler(scheduler: Any) -> None:
    """Register the handler for requests of `run_on_scheduler` in the scheduler."""
    unpack: Callable[[bytes], Any] = loads
    wrapped: Callable[[Any], Any] = to_serialize

    async def answer(function: bytes, args: bytes) -> dict[str, Any]:
        value = unpack(function)(*unpack(args), dask_scheduler=scheduler)
        return {"result": wrapped(await value if inspect.isawaitable(value) else value)}

    scheduler.handlers[_OP] = answer


async def ping_scheduler(client: Any) -> None:
    """Ping a client's scheduler. The scheduler doesn't log the ping."""
    await client.scheduler.echo()


def close_surplus(client: Any) -> None:
    """Close all idle connections of a client except one for each address. Dask itself would close none."""
    for comms in client.rpc.available.values():
        for comm in list(comms)[1:]:
            comms.remove(comm)
            client.rpc.semaphore.release()
            comm.abort()


def find_plugin(scheduler: Any, name: str) -> Any:
    """Return a scheduler plugin by name; None if no plugin has this name."""
    return scheduler.plugins.get(name)


async def accepts_connections(address: str, within_s: float) -> bool:
    """Return whether a process accepts connections at an address, even if busy. True for in-process addresses."""
    if not address.startswith(("tcp://", "tls://")):
        return True
    try:
        opening = asyncio.open_connection(*get_address_host_port(address))
        _, writer = await asyncio.wait_for(opening, within_s)
    except OSError:  # TimeoutError is a subclass of OSError.
        return False
    writer.close()
    with contextlib.suppress(OSError):  # The other side may have reset the connection.
        await writer.wait_closed()  # Without this wait the socket would outlive the call.
    return True


def pause(scheduler: Any, worker: str, reason: str) -> None:
    """Stop assigning tasks to a worker. This takes effect at once, because the scheduler itself assigns tasks."""
    scheduler.handle_worker_status_change("paused", worker, reason)


def resume(scheduler: Any, worker: str, reason: str) -> None:
    """Assign tasks to a paused worker again, unless the worker is closing."""
    if scheduler.workers[worker].status.name == "paused":
        scheduler.handle_worker_status_change("running", worker, reason)


def is_resume_event(msg: Any) -> bool:
    """Return whether a logged event says that a worker accepts tasks again. The topic is the worker's address."""
    return isinstance(msg, Mapping) and (msg.get("action"), msg.get("status")) == ("worker-status-change", "running")


def count_work(scheduler: Any, count: int) -> None:
    """Add `count` to the scheduler's work in progress, because a scheduler without work may end by idle-timeout."""
    scheduler._active_graph_updates += count


def follow_adaptive(scheduler: Any, shown: Callable[[int], int], told: Callable[[int], int]) -> None:
    """Replace the scheduler's answers about the number of workers that adaptive clusters should have.

    Args:
        scheduler: The scheduler.
        shown: Maps the scheduler's own number to the number on the scheduler's pages.
        told: Maps the scheduler's own number to the answer for an adaptive cluster.
    """
    adaptive_target = scheduler.adaptive_target
    scheduler.adaptive_target = lambda target_duration=None: shown(adaptive_target(target_duration))
    scheduler.handlers["adaptive_target"] = lambda target_duration=None: told(adaptive_target(target_duration))


def has_tasks_to_place(scheduler: Any) -> bool:
    """Return whether any task waits for a Dask worker to run on."""
    return bool(scheduler.queued or scheduler.unrunnable)


def is_starting(state: Any) -> bool:
    """Return whether a Dask worker has connected but isn't ready for tasks yet."""
    return bool(state.status.name == "init")


def is_running(state: Any) -> bool:
    """Return whether a Dask worker accepts tasks."""
    return bool(state.status.name == "running")


async def call_worker(
    scheduler: Any, worker: str, function: Callable[..., Any], *args: Any, within_s: float, nanny: bool = False
) -> Any:
    """Run a function in a Dask worker or the worker's nanny, from the scheduler, and return the result.

    Raises:
        RuntimeError: The function raised an error. The text is included.
        Exception: The function could not be run, or not in time.
    """
    message = {"op": "run", "function": dumps(function), "args": dumps(args), "kwargs": dumps({}), "wait": True}  # type: ignore[no-untyped-call]
    coming = scheduler.broadcast(msg=message, workers=[worker], nanny=nanny)
    answer = (await asyncio.wait_for(coming, within_s))[worker]
    if answer["status"] != "OK":
        raise RuntimeError(answer["exception_text"])
    return _unpack_result(answer["result"])


def _unpack_result(result: Any) -> Any:
    if isinstance(result, Serialized):
        return deserialize(result.header, result.frames)  # type: ignore[no-untyped-call]
    return result.data if isinstance(result, Serialize) else result

"""Waits for answers of other processes are in `Requests`; each other module that can wait is listed with the reason."""

from __future__ import annotations

import ast
from pathlib import Path

from tests import layers

WAITS = {"Barrier", "BoundedSemaphore", "Condition", "Event", "Flag", "Future", "Queue", "Semaphore", "SimpleQueue"}

SOCKETS = {"recv", "recv_fds", "recv_into", "recvmsg", "recvmsg_into"}
OF_MODULES = {
    "asyncio.run_coroutine_threadsafe",
    "futures.wait",
    "ray.get",
    "ray.wait",
    "select.epoll",
    "select.poll",
    "select.select",
    "selectors.DefaultSelector",
}
EXECUTORS = layers.CORE.parents[1] / "executors"

# `_protocol.requests` waits for answers. Any other module that does so has the reason in its text.
KNOWN = {
    "_protocol.requests": "answers",
    "_devices.copies": "a device, for copies that it was given",
    "features.children.child": "the end of a child, and what it is ready by",
    "features.debugging.desk": "nothing: it looks whether a terminal's connection is closed",
    "features.profiling.sampling": "py-spy beside a worker, until it samples and until it has written",
    "features.children.weights": "the other end of a child's connection: both are role code",
    "_signals.deferred": "what is done off the main thread, and the flag that is waited for",
    "_system.jobs": "jobs, by the threads that run them; the end of such a thread, and what several have begun",
    "_owned.owned": "the state of a runtime, pool or group",
    "_worker_group.workforce": "how far workers have come",
    "_worker_group.worker_group": "the next try, or the group's end",
    "features.looking.audit": "the next look",
    "features.looking.glance": "the stacks that ranks tell, for a moment",
    "features.debugging.terminal": "what the driver shows, in a process that is a terminal",
    "features.debugging.prompt": "what somebody types, where a rank is stopped",
    "_api.slots": "the next look whether a spare can be had, or the end",
    "_calls.services": "the dispatcher, for the last records",
    "_signals.arrivals": "rows and calls that have ended, by who reads them",
    "placement": "slots that somebody gives back",
    "wire.event_loop": "the end of an event loop's thread",
    "wire.lane": "what is sent, to have gone out",
    "keeper.process": "the end of other looks at workers, for a moment",
    "keeper.keeper": "its own end, by another thread, and that of workers; the first bytes of a connection",
    "keeper.slots": "the connection to a keeper, and its end",
    "wire.arriving": "bytes that arrive in a memory file, by who passes them on",
    "worker.residents.passing": "a large argument that another worker passes on, or why it can't",
    "worker.lane": "work",
    "features.children.process": "what a function is, from the worker that has started the process",
    "features.recordings.files": "room among what is to be written, by the lane that records",
    "features.rows.row_queue": "what the driver says of rows, by a method that yields them",
    "worker.serving.host": "the place of background lanes, by the main one",
    "worker.birth.main": "the host, which is made beside the main thread; and its end",
    "features.memory.ledger": "the lane, for a moment, by who looks at a worker's memory",
    "worker.serving.over": "what a hook of role code has begun: a future, a thread or a process that it has returned",
    "worker.serving.tasks": "async calls, while nothing else comes",
    "worker.residents.store": "residents that are being made here",
    "features.process_groups.groups": "the end of whoever looks for groups to cut",
    "features.process_groups.making": "the thread in which torch makes a group",
    "worker.serving.service": "the first bytes of a socket, with the descriptors that come along",
    "worker.birth.template": "requests for forks; it has one thread, and answers them itself",
    "features.process_groups.books": "nothing: it looks whether connections have ended",
    "_system.readable": "what a descriptor has: the template's answer, by a pipe of its own, or the end of a process",
    "_system.printer": "room in the terminal or pipe that it prints to",
    "wire.framing": "nothing by itself: whoever reads a frame does",
    "wire.hello": "the other side's proof, before there are messages on a connection",
    "wire.peer": "the answer on a connection of its own, which is the request's number: nobody else reads there",
    "wire._secured": "nothing by itself: whoever reads a connection does",
    "wire.turns": "messages on a lane, by the thread that uses them; answers come there",
    "colocate_dask.loop": "what is run on the loop of Dask's client, by that; and the loop's own news",
    "colocate_dask.reservations": "workers that somebody gives back, on the scheduler's loop",
    "colocate_ray.janitor": "the end of a driver and of its proxy; it imports nothing of colocate",
    "colocate_ray.proxy": "the order to begin, on the main thread",
    "colocate_ray.joining": "the first bytes of Ray's own servers, which speak no messages of ours",
    "colocate_ray.holder": "its own end, by Ray",
    "colocate_ray.holders": "actors, by Ray",
    "colocate_ray.owners": "actors, by Ray",
    "colocate_ray.placing": "placement groups and actors, by Ray",
    "colocate_ray.silence": "the first bytes of Ray's own servers, of all at once",
}


def waits(tree: ast.AST) -> bool:
    """Return whether a module makes a waitable object, or waits for a descriptor or an engine."""
    return any(
        (name := _called(node.func)).rpartition(".")[2] in WAITS | SOCKETS or name in OF_MODULES
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    )


def _called(function: ast.expr) -> str:
    """Return the last two parts of a function's name."""
    if isinstance(function, ast.Subscript):
        function = function.value
    return ".".join(ast.unparse(function).split(".")[-2:])


def test_waiting_modules_are_known() -> None:
    for line in ("Future[int]()", "concurrent.futures.wait([x])", "select.poll()", "self._sock.recv(1)", "ray.get(x)"):
        assert waits(ast.parse(line))
    assert not waits(ast.parse("process.poll()"))
    modules = layers.modules() | {_name(path): path for path in EXECUTORS.rglob("*.py")}
    found = {name for name, path in modules.items() if waits(ast.parse(path.read_text(encoding="utf-8")))}
    assert found - KNOWN.keys() == set(), "ask by colocate._protocol.requests.Requests, or say here what it waits for"
    assert KNOWN.keys() - found == set()


def _name(path: Path) -> str:
    return ".".join(path.relative_to(EXECUTORS).with_suffix("").parts)

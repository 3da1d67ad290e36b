"""Whoever asks another process waits in `Requests`; what else in core can wait is known, with what it waits for."""

from __future__ import annotations

import ast

from tests import layers

WAITS = {"Barrier", "BoundedSemaphore", "Condition", "Event", "Flag", "Future", "Queue", "Semaphore", "SimpleQueue"}

# None of these waits for the answer to a question, but for the first one.
KNOWN = {
    "_protocol.requests": "answers",
    "_role.call": "calls, by whoever has made them",
    "_system.off_main": "what is done off the main thread, and the flag that is waited for",
    "_system.jobs": "jobs, by the threads that run them; and the end of such a thread",
    "_owned.lifecycle": "the state of a runtime, pool or group",
    "_crew.stages": "how far workers have come",
    "_crew.restart": "the next try, or the group's end",
    "_api.audit": "the next look",
    "_job.run": "the dispatcher, for the last records",
    "placement": "slots that somebody gives back",
    "wire.hub": "the end of a hub's thread",
    "wire.lane": "what is sent, to have gone out",
    "keeper.keeper": "its own end, by another thread",
    "keeper.slots": "the connection to a keeper, and its end",
    "keeper.started": "the end of a keeper's worker",
    "worker.lane": "work",
    "worker.tasks": "async calls, while nothing else comes",
    "worker.store": "residents that are being made here",
    "worker.process_groups": "the thread in which torch makes a group",
}


def test_what_can_wait() -> None:
    found = {
        name
        for name, path in layers.modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _called(node.func) in WAITS
    }
    assert found - KNOWN.keys() == set(), "ask by colocate._protocol.requests.Requests, or say here what it waits for"
    assert KNOWN.keys() - found == set()


def _called(function: ast.expr) -> str | None:
    if isinstance(function, ast.Subscript):
        function = function.value
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)

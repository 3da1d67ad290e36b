"""Objects of users show their public names, and nothing else."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import colocate
from colocate.testing.probes.plain import Echo

HELD = ("alive", "close", "name", "owner", "state")
SURFACE = {
    "runtime": (
        *HELD,
        "attach",
        "audit",
        "detached",
        "graph",
        "groups",
        "observe",
        "record",
        "reserve",
        "seed",
        "trace",
    ),
    "pool": (*HELD, "detach", "groups", "slots", "spares", "spawn"),
    "group": (
        *HELD,
        "checkpoint",
        "generation",
        "memory",
        "pause",
        "pipeline",
        "resize",
        "restore",
        "resume",
        "role",
        "roles",
        "run",
        "scope",
        "sleep",
        "wait_ready",
        "wake",
    ),
    "method": ("keep", "options", "submit"),
    "call": ("add_done_callback", "cancel", "done", "exception", "label", "result"),
    "resident": ("fetch", "free", "ref", "spec", "wait"),
    "graph": ("data", "render"),
}


@pytest.fixture(scope="module")
def things() -> Any:
    with colocate.connect() as runtime, runtime.reserve(1) as pool:
        group = pool.spawn({"echo": colocate.role(Echo)})
        method = group["echo"].noop
        made = {"method": method, "call": method.submit(), "resident": method.keep()}
        yield {"runtime": runtime, "pool": pool, "group": group, **made, "graph": runtime.graph}


@pytest.mark.parametrize("kind", SURFACE)
def test_surface(things: dict[str, Any], kind: str) -> None:
    shown = [name for name in dir(things[kind]) if not name.startswith("_")]
    assert shown == sorted(SURFACE[kind])
    for name in shown:
        assert inspect.getdoc(inspect.getattr_static(type(things[kind]), name)), name


def test_owned_objects_keep_identity(things: dict[str, Any]) -> None:
    runtime, pool, group = things["runtime"], things["pool"], things["group"]
    assert pool.groups[group.name] is group is runtime.groups[group.name]
    assert (group.owner, pool.owner, runtime.owner) == (pool, runtime, None)

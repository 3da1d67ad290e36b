"""What the tests of detached pools stand on: a name of their own, pools to detach, other drivers."""

from __future__ import annotations

import contextlib
import textwrap
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import colocate
from colocate import Pool, Runtime
from colocate.errors import ConfigError
from colocate.executor import Detachable
from colocate.testing.executors.drivers import Driver, Scripted, Scripts
from colocate.testing.probes.counting import Counting

TTL_S = 300.0  # longer than any test

HEADER = """
from colocate.testing.probes.counting import Counting
from colocate.errors import ClosedError

def new(slots=2, **more):
    pool = runtime.reserve(slots, cpus=0, detachable=True, **more)
    return pool, pool.spawn({"counting": colocate.role(Counting)}, name="counting").role("counting", Counting)

def attached(name, **more):
    pool = runtime.attach(name, **more)
    return pool, pool.groups["counting"].role("counting")
"""


def counting(pool: Pool) -> Counting:
    """The view of the role that the tests detach."""
    return pool.groups["counting"].role("counting", Counting)


def new(runtime: Runtime, slots: int = 2, name: str = "counting") -> tuple[Pool, Counting]:
    """A pool with such a role."""
    pool = runtime.reserve(slots, cpus=0, detachable=True)
    return pool, pool.spawn({"counting": colocate.role(Counting)}, name=name).role("counting", Counting)


def published(runtime: Runtime, name: str) -> dict[str, Any] | None:
    """What the cluster says of a detached pool."""
    return next((each for each in runtime.detached() if each["name"] == name), None)


class DetachedCase(Scripted):
    """Base of the areas about detached pools."""

    @pytest.fixture
    def name(self, no_leaks: None, runtime: Runtime) -> Iterator[str]:
        """A name for a pool, which is closed after the test if it is still there."""
        name = f"test-{uuid.uuid4().hex[:8]}"
        yield name
        if isinstance(runtime._node.services.executor, Detachable) and published(runtime, name) is not None:
            # It has just ended, or the test has left it hung: one that cares closes its pool itself.
            with contextlib.suppress(ConfigError, BaseExceptionGroup):
                runtime.attach(name, own=True).close(grace=1, force=True)

    def start(self, scripts: Scripts, text: str, name: str) -> Driver:
        """Start a driver that has a runtime and knows the name."""
        return scripts.start(HEADER + f"NAME = {name!r}\nruntime = CONNECT\n" + textwrap.dedent(text))

"""Where colocate listens: at ports of a range, when one is given."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Collection
from typing import Any

import psutil
import pytest

import colocate
from colocate.errors import ColocateError
from colocate.executor import Detachable, OwnProcess
from colocate.testing.executors._base import ExecutorCase, needs, of_executor
from colocate.testing.probes.collectives import Collective
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import starter_of
from colocate_report.window import window

_MANY = 40
_EVERYWHERE = ("0.0.0.0", "::")  # no socket of colocate's: engines have such


class Ports(ExecutorCase):
    """`connect(ports=...)`."""

    @needs(OwnProcess)
    @of_executor
    def test_ports_of_a_range(self, no_leaks: None) -> None:
        """Whatever listens for others does so there, also torch's store; gloo has a port of its own in each worker."""
        pytest.importorskip("torch")
        first, before = _free(_MANY), _listening(None)
        within = range(first, first + _MANY)
        with self.connect(ports=f"{within[0]}-{within[-1]}") as runtime, window(runtime, "ports"):
            executor = runtime._node.services.executor
            detachable = isinstance(executor, Detachable)
            pool = runtime.reserve(2, cpus=0, strategy=self.strategy, detachable=detachable)
            halves = {name: colocate.role(Echo).on(slots=[slot]) for slot, name in enumerate(("left", "right"))}
            group = pool.spawn({**halves, "all": colocate.role(Collective)})
            left, right = (group.role(name, Echo) for name in halves)
            workers = [pid for pid, *_ in left.place() + right.place()]
            assert right.first(left.echo.keep("x").ref) == ["x"]
            others = {os.getpid(), *map(starter_of, workers)}
            assert _listening(others) - before <= {*within}
            assert group.role("all", Collective).sum(1.0) == [2.0, 2.0]
            assert any(_listening(workers) & {*within})
            for worker in workers:
                assert len(_listening([worker]) - {*within}) <= 1

    @needs(OwnProcess)
    def test_ports_that_are_used_up(self, no_leaks: None) -> None:
        """The error has the range, what needed a port, and what to do; nothing is left."""
        pytest.importorskip("torch")
        with socket.create_server(("", 0)) as taken:
            port = taken.getsockname()[1]
            with self.connect(ports=f"{port}-{port}") as runtime:
                role = colocate.role(Collective).on(default_group=True)
                with pytest.raises(
                    ColocateError,
                    match=rf"no port of {port}-{port} is free on .* for (a keeper|torch's store).*: give more of them "
                    r"\(connect\(\.\.\., ports=\.\.\.\)\)",
                ):
                    runtime.reserve(2, cpus=0, strategy=self.strategy).spawn({"all": role})
                assert not runtime.groups
                assert not runtime.audit()


def _free(count: int) -> int:
    """The first of so many ports that nobody has, below those that the system gives away."""
    while True:
        first = random.randrange(10_000, 30_000)
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for port in range(first, first + count):
                sockets.enter_context(socket.create_server(("", port)))
            return first


def _listening(pids: Collection[int] | None) -> set[int]:
    """The ports at which some processes listen, None for all of this machine; but for those of all addresses."""
    found: list[Any] = [*psutil.net_connections("tcp")] if pids is None else []
    for pid in pids or ():
        found += psutil.Process(pid).net_connections("tcp")
    return {each.laddr.port for each in found if each.status == "LISTEN" and each.laddr.ip not in _EVERYWHERE}

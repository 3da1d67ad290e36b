"""The parts of `distributed` that its documentation doesn't promise are as `colocate_dask` needs them.

The test of its sockets is in test_joined.py, which has a cluster.
"""

from __future__ import annotations

import inspect
from typing import Any

from distributed import Adaptive, Client, Scheduler, Status
from distributed.core import Server
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.serialize import Serialize, Serialized, deserialize, serialize, to_serialize
from tornado.ioloop import PeriodicCallback

from colocate_dask.reservations import Reservations


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_scheduler() -> None:
    """The scheduler has the methods by which `colocate_dask` pauses workers and sends to them."""
    assert list(inspect.signature(Scheduler.handle_worker_status_change).parameters)[1:] == [
        "status",
        "worker",
        "stimulus_id",
    ]
    assert {"msg", "workers", "nanny"} <= parameters(Scheduler.broadcast)
    assert {"topic", "msg"} <= parameters(Scheduler.log_event)
    assert {"init", "paused", "running"} <= {status.name for status in Status}
    assert "if self._active_graph_updates > 0:" in inspect.getsource(Scheduler.check_idle)
    assert '"action": "worker-status-change"' in inspect.getsource(Scheduler.handle_worker_status_change)


def test_adaptive_target() -> None:
    """Adaptive clusters use the scheduler's `adaptive_target`, which finds tasks without workers in two collections."""
    assert '"adaptive_target": self.adaptive_target' in inspect.getsource(Scheduler)
    assert parameters(Scheduler.adaptive_target) == {"self", "target_duration"}
    assert "self.scheduler.adaptive_target(" in inspect.getsource(Adaptive.target)
    assert "concat([self.queued, self.unrunnable.keys()])" in inspect.getsource(Scheduler.adaptive_target)


def test_client() -> None:
    """A client's periodic poll of the workers can be stopped."""
    assert 'self._periodic_callbacks["scheduler-info"]' in inspect.getsource(Client.__init__)
    assert hasattr(PeriodicCallback, "stop")


def test_questions() -> None:
    """A Dask server looks up its handlers by name, and has a handler `echo`."""
    assert "handler = self.handlers[op]" in inspect.getsource(Server)
    assert '"echo": self.echo' in inspect.getsource(Server)


def test_plugin_hooks() -> None:
    """Dask's scheduler plugin has every hook that `Reservations` overrides, with fitting parameters."""
    for name in (
        "add_worker",
        "remove_worker",
        "remove_client",
        "transition",
        "log_event",
        "valid_workers_downscaling",
    ):
        theirs = list(inspect.signature(getattr(SchedulerPlugin, name)).parameters.values())
        ours = inspect.signature(getattr(Reservations, name))
        positional = [p for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = {p.name: None for p in theirs if p.kind is p.KEYWORD_ONLY}
        ours.bind(*(None for _ in positional), **keywords)


def test_serialization() -> None:
    """Values that the scheduler forwards unread can be deserialized."""
    parts: Any = (Serialize, Serialized, deserialize, serialize)
    wrapper, packed, unpack, write = parts
    assert wrapper(1).data == 1
    assert to_serialize is Serialize
    sent = packed(*write({"a": 1}))
    assert unpack(sent.header, sent.frames) == {"a": 1}

"""Tests of calls: results, the thread that runs role code, async methods, and cancellation."""

from __future__ import annotations

from colocate import ColocatedGroup, Runtime
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, smoke
from colocate.testing.gate import Gate
from colocate.testing.probes.plain import Echo, Log
from colocate.testing.waiting import PATIENCE_S


class Calls(ExecutorCase):
    """Tests of calls by a view."""

    @smoke
    def test_plain_call(self, pair: ColocatedGroup) -> None:
        """A call blocks and returns the collected value: by default a list with an item per rank."""
        echo = pair.role("echo", Echo)
        assert echo.noop() == [None, None]
        assert echo.echo({"x": (1, "two", 3.0)}) == [{"x": (1, "two", 3.0)}] * 2
        assert echo.first("a") == "a"

    def test_lane(self, pair: ColocatedGroup, runtime: Runtime) -> None:
        """Role code runs on one thread per worker, which is the main thread if the worker has its own process."""
        places = {tuple(pair.role("echo", Echo).place()) for _ in range(3)}
        assert len(places) == 1
        (first, second) = places.pop()
        assert first[:2] != second[:2]
        own_process = isinstance(runtime._node.services.executor, OwnProcess)
        assert [is_main for _, _, is_main in (first, second)] == [own_process] * 2

    def test_async_overlap(self, pair: ColocatedGroup) -> None:
        """Calls of an async method overlap up to its concurrency, so that two calls can wait for each other."""
        log = clear_log(pair)
        first, second = log.meet.submit("a"), log.meet.submit("b")
        assert first.result(PATIENCE_S) == ["waited"] * 2
        assert second.result(PATIENCE_S) == ["woke the other"] * 2
        assert log.read() == [["a", "b"]] * 2


def clear_log(group: ColocatedGroup) -> Log:
    """Clear the entries of a group's role `Log`, and return the role's view."""
    log = group.role("log", Log)
    log.clear()
    return log


class Cancelling(ExecutorCase):
    """Tests of `call.cancel()`."""

    def test_cancel_running(self, pair: ColocatedGroup) -> None:
        """After a cancellation, a running method sees `ctx.cancelled`, and the call still has a result."""
        log = clear_log(pair)
        with Gate() as gate:
            call = log.look_until_cancelled.submit(gate.address)
            gate.wait_for(2)
            gate.open()
            assert not call.cancel()
            assert call.result(PATIENCE_S) == ["cancelled", "cancelled"]
        log.add("later")
        assert log.read() == [["later"], ["later"]]

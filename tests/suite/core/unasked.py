"""A submitted call's failure that nobody asks about is logged once, with the line of the call."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest

import colocate
from colocate import Call
from colocate._system.lines import find_caller
from colocate.testing.executors import unasked
from colocate.testing.executors._base import Spawn, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Log
from colocate.testing.waiting import PATIENCE_S, wait_until


async def _await_too_briefly(call: Call[Any]) -> None:
    await asyncio.wait_for(call, 0.01)


GIVES_UP: dict[str, Callable[[Call[Any]], object]] = {
    "result": lambda call: call.result(0.01),
    "exception": lambda call: call.exception(0.01),
    "await": lambda call: asyncio.run(_await_too_briefly(call)),
    "wait": lambda call: colocate.wait([call], 0.01),
    "as_completed": lambda call: list(colocate.as_completed([call], 0.01)),
}


class UnaskedFailures(unasked.UnaskedFailures):
    """Failures of submitted calls that nobody asks about."""

    @needs_feature("pipelines")
    def test_a_submitted_failure_is_logged(self, spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
        """A failure is logged when its call is dropped or its group closes, on every lane and in pipelines."""
        roles = {"faulty": colocate.role(Faulty), "beside": colocate.role(Faulty).on(background=True)}
        group = spawn(roles, slots=1)
        faulty, beside_view = group.role("faulty", Faulty), group.role("beside", Faulty)

        def told(where: tuple[str, int], after: int, label: str = "faulty.fail", kind: str = "a plain one") -> None:
            wait_until(lambda: kind in caplog.text, "the failure is logged")
            (record,) = (log_record for log_record in caplog.records if "never asked for" in log_record.getMessage())
            at = f"submitted at {where[0]}:{where[1] + after}: the call has failed, and its result was never asked for"
            assert record.getMessage().startswith(f"{label} of group {group.name!r}, {at}")
            assert record.levelno == logging.ERROR
            caplog.clear()

        with Gate() as gate:
            waits, location = faulty.wait.submit(gate.address), find_caller()
            faulty.fail.options(timeout=PATIENCE_S).submit()
            gate.wait_for()
        waits.result(PATIENCE_S)
        told(location, 1)
        call, location = faulty.fail.submit(), find_caller()
        wait_until(call.done, "it has failed")
        assert not caplog.text
        del call
        told(location, 0)
        location = find_caller()
        with group.pipeline():
            faulty.fail.submit()
        told(location, 2)
        location = find_caller()
        beside_view.fail.submit()
        told(location, 1, "beside.fail")
        call, location = faulty.fail.submit(), find_caller()
        wait_until(call.done, "it has failed")
        group.close()
        told(location, 0)
        del call
        assert not caplog.text

    @pytest.mark.parametrize("give_up", [*GIVES_UP])
    def test_failure_after_abandoned_wait_is_logged(
        self, spawn: Spawn, caplog: pytest.LogCaptureFixture, give_up: str
    ) -> None:
        """A failure after its caller gave up waiting is logged, unless somebody asks for the error later."""
        faulty = spawn({"faulty": colocate.role(Faulty)}, slots=1).role("faulty", Faulty)
        for asks in (True, False):
            with Gate() as gate:
                waits, call = faulty.wait.submit(gate.address), faulty.fail.submit()
                with contextlib.suppress(TimeoutError):
                    GIVES_UP[give_up](call)
                assert not call.done()
            waits.result(PATIENCE_S)
            wait_until(call.done, "it has failed")
            if asks:
                assert call.exception() is not None
            del call
        gc.collect()  # asyncio's exceptions keep the call in a cycle
        wait_until(lambda: "a plain one" in caplog.text, "the failure is logged")
        (record,) = (log_record for log_record in caplog.records if "never asked for" in log_record.getMessage())
        assert record.getMessage().startswith("faulty.fail of group ")

    @needs_feature("standalone")
    def test_of_an_object_outside_any_worker(self, caplog: pytest.LogCaptureFixture) -> None:
        """A dropped call's failure is logged for a role object outside any worker, too."""
        faulty = Faulty()
        assert isinstance(faulty.fail.submit().exception(), ValueError)
        assert not caplog.text
        faulty.fail.submit()
        (record,) = caplog.records
        assert record.getMessage().startswith("Faulty.fail has failed, and its result was never asked for: ")
        assert "a plain one" in record.getMessage()

    def test_calls_that_a_close_has_ended(self, spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
        """Unasked calls that a close ends are logged in one record with their number."""
        group = spawn({"faulty": colocate.role(Faulty), "log": colocate.role(Log)}, slots=1)
        faulty = group.role("faulty", Faulty)
        with Gate() as gate:
            # When this call ends, the worker knows of the close and begins no other call.
            group.role("log", Log).look_until_cancelled.submit(gate.address).add_done_callback(lambda call: None)
            location = find_caller()
            awaited, _ = [faulty.fine.submit() for _ in range(2)], [faulty.fine.submit() for _ in range(3)]
            gate.wait_for()
            for call in awaited:
                call.add_done_callback(lambda call: None)
        group.close()
        wait_until(lambda: "faulty.fine" in caplog.text, "it is logged")
        (record,) = (log_record for log_record in caplog.records if "faulty.fine" in log_record.getMessage())
        assert f"faulty.fine, submitted at {location[0]}:{location[1] + 1} (3 times)" in record.getMessage()

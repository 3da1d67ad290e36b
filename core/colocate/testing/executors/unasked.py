"""Tests of submitted calls that fail although no caller asks for the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import colocate
from colocate import Call, ColocatedGroup
from colocate.errors import ColocateError, WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.probes.faulty import Faulty
from colocate.testing.waiting import PATIENCE_S, wait_until


async def _await_call(call: Call[Any]) -> None:
    await asyncio.gather(call, return_exceptions=True)


def _refuse_call(call: Call[Any]) -> None:
    with pytest.raises(ColocateError):
        call.result()


QUESTIONS: dict[str, Callable[[Call[Any]], object]] = {
    "result": _refuse_call,
    "exception": lambda call: call.exception(),
    "await": lambda call: asyncio.run(_await_call(call)),
    "callback": lambda call: call.add_done_callback(lambda call: None),
    "wait": lambda call: colocate.wait([call]),
    "as_completed": lambda call: list(colocate.as_completed([call])),
    "cancel": lambda call: call.cancel(),
}


class UnaskedFailures(ExecutorCase):
    """The failure of a submitted call is reported even if no caller asks for the outcome."""

    @pytest.mark.parametrize("ask", [*QUESTIONS])
    def test_requested_outcome_is_not_logged(
        self, pair: ColocatedGroup, caplog: pytest.LogCaptureFixture, ask: str
    ) -> None:
        """A failure isn't logged if a caller asks for the outcome, before or after the call has failed."""
        faulty = pair.role("faulty", Faulty)
        for waits in (False, True):
            call = faulty.fail.submit()
            if waits:
                wait_until(call.done, "it has failed")
            QUESTIONS[ask](call)
            wait_until(call.done, "it has failed")
            del call
        faulty.fail.submit("exit")
        wait_until(lambda: "SystemExit" in caplog.text, "what comes afterwards is logged")
        assert "a plain one" not in caplog.text

    @needs(OwnProcess)
    @pytest.mark.parametrize("asks", [True, False])
    def test_unobserved_worker_death_raises_on_close(self, spawn: Spawn, asks: bool) -> None:
        """Closing the group raises `WorkerDied`, unless a caller has asked for the outcome of the call."""
        group = spawn({"faulty": colocate.role(Faulty)}, slots=1)
        call = group.role("faulty", Faulty).kill.submit()
        wait_until(lambda: group.state == "failed", "the group has failed")
        if asks:
            assert isinstance(call.exception(PATIENCE_S), WorkerDied)
            group.close()
        else:
            with pytest.raises(ExceptionGroup) as caught:
                group.close()
            assert [type(error) for error in caught.value.exceptions] == [WorkerDied]

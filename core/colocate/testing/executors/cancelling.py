"""Cancelling calls: what no rank has begun goes from all of them, or from none."""

from __future__ import annotations

import concurrent.futures
import math

import pytest

import colocate
from colocate import ColocatedGroup
from colocate.errors import CallCancelled, CallTimeout, RoleError
from colocate.testing.executors._base import ExecutorCase, of_executor
from colocate.testing.executors.calls import cleared
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S


class Cancelling(ExecutorCase):
    """`call.cancel()`."""

    def test_cancel_queued(self, pair: ColocatedGroup) -> None:
        """A queued call is withdrawn from every rank; those before and after it run."""
        log = cleared(pair)
        with Gate() as gate:
            first = log.add_at.submit(gate.address, "first")
            second = log.add.submit("second")
            third = log.add.submit("third")
            gate.wait_for(2)
            assert second.cancel()
            assert second.done()
            with pytest.raises(CallCancelled, match=r"log\.add was cancelled before any rank had begun it"):
                second.result()
            assert isinstance(second.exception(), concurrent.futures.CancelledError)
            assert not second.cancel()
        first.result(PATIENCE_S)
        third.result(PATIENCE_S)
        assert log.read() == [["first", "third"], ["first", "third"]]

    @of_executor
    def test_cancel_running(self, pair: ColocatedGroup) -> None:
        """A running method finds `ctx.cancelled` and ends as it likes; its result is there for whoever asks."""
        log = cleared(pair)
        with Gate() as gate:
            call = log.look_until_cancelled.submit(gate.address)
            gate.wait_for(2)
            gate.open()
            assert not call.cancel()
            assert call.result(PATIENCE_S) == ["cancelled", "cancelled"]
        log.add("later")
        assert log.read() == [["later"], ["later"]]

    def test_cancel_kept(self, pair: ColocatedGroup) -> None:
        """The resident of a cancelled call is of no use, and says why; so does what was to use it."""
        log, rows = cleared(pair), pair.role("rows", Rows)
        with Gate() as gate, pair.scope():
            log.add_at.submit(gate.address, "first")
            gate.wait_for(2)
            kept = rows.double.keep([1, 2])
            used = rows.double.submit(kept.ref)
            assert kept._kept.call.cancel()  # type: ignore[attr-defined]
            gate.open()
            with pytest.raises((CallCancelled, RoleError)):
                used.result(PATIENCE_S)
            with pytest.raises(CallCancelled):
                kept.fetch()
            assert log.read() == [["first"], ["first"]]

    def test_a_default_deadline(self, no_leaks: None) -> None:
        """`call_timeout` is that of every call that names none of its own; infinity is none."""
        with self.connect(call_timeout=0.2) as runtime:
            group = runtime.reserve(1, cpus=0).spawn({"faulty": colocate.role(Faulty)})
            wait = group.role("faulty", Faulty).wait
            with Gate() as gate:
                patient = wait.options(timeout=math.inf).submit(gate.address)
                assert isinstance(wait.submit(gate.address).exception(PATIENCE_S), CallTimeout)
                with pytest.raises(CallTimeout, match=r"0\.2 s"):
                    group.run(lambda ctx: None)
            patient.result(PATIENCE_S)

    def test_a_fetch_that_waits_too_long(self, pair: ColocatedGroup) -> None:
        """It stops waiting; the call goes on, and the resident stays."""
        faulty = pair.role("faulty", Faulty)
        with Gate() as gate:
            kept = faulty.wait.keep(gate.address)
            with pytest.raises(TimeoutError):
                kept.fetch(timeout=0.01)
        assert kept.fetch(timeout=PATIENCE_S) == [0, 1]

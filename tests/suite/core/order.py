"""The order of calls on every rank, the hold after a failure, and the errors that the caller gets."""

from __future__ import annotations

import asyncio
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import colocate
from colocate import Call, ColocatedGroup
from colocate.errors import CallTimeout, ColocateError, RoleError
from colocate.testing.executors import order
from colocate.testing.executors._base import Spawn, needs_feature
from colocate.testing.executors.calls import clear_log
from colocate.testing.executors.order import ADD, RAISE, get_error
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo, Log
from colocate.testing.waiting import PATIENCE_S, becomes_true, wait_until


class Order(order.Order):
    """The order of calls, and the hold after a failed one."""

    def test_order(self, pair: ColocatedGroup) -> None:
        """Calls run in the order of submission on every rank, whatever their sizes, roles and kinds."""
        log, echo = clear_log(pair), pair.role("echo", Echo)
        for index in range(20):
            log.add.submit(index if index % 3 else (index, "x" * 200_000))
            echo.noop.keep()
            if index % 4 == 0:
                log.add.options(ranks=[0]).submit(("zero", index))
        first, second = [
            [e[0] if isinstance(e, tuple) and e[0] != "zero" else e for e in entries] for entries in log.read()
        ]
        assert second == list(range(20))
        assert [entry for entry in first if not isinstance(entry, tuple)] == second
        assert [entry for entry in first if isinstance(entry, tuple)] == [("zero", index) for index in range(0, 20, 4)]

    def test_failure_comes_at_once(self, pair: ColocatedGroup) -> None:
        """A failure reaches the caller while other ranks are still in the call, and the error names these ranks."""
        log = clear_log(pair)
        with Gate() as gate, Gate() as trigger:
            call = log.at.submit([gate.address, trigger.address], [ADD, RAISE])  # type: ignore[arg-type]
            gate.wait_for()
            trigger.open()
            error = get_error(call)
            assert isinstance(error, RoleError)
            assert (error.rank, error.role, error.method) == (1, "log", "at")
            assert "not done on rank 0" in str(error)

    def test_hold(self, pair: ColocatedGroup) -> None:
        """After a failure no rank begins another call until all ranks are back; then the queued calls run."""
        log = clear_log(pair)
        with Gate() as gate, Gate() as trigger:
            failing = log.at.submit([gate.address, trigger.address], [ADD, RAISE], "kept on")  # type: ignore[arg-type]
            queued = log.add_and_look.submit(gate.address, "queued")
            gate.wait_for()
            trigger.open()
            get_error(failing)
            late = log.add_and_look.submit(gate.address, "late")
            assert not queued.done()
        # On the failed rank, too, these calls began only after the gate had released the other rank.
        assert queued.result(PATIENCE_S) == [True, True]
        assert late.result(PATIENCE_S) == [True, True]
        assert log.read() == [["kept on", "queued", "late"], ["queued", "late"]]

    def test_later_call_failed(self, pair: ColocatedGroup) -> None:
        """A later call that also failed keeps its own cause, names the first failure, and runs on no other rank."""
        log = clear_log(pair)
        with Gate() as first, Gate() as second:
            failing = log.at.submit([first.address, None], [RAISE, ADD], "a")  # type: ignore[arg-type]
            begun = log.at.submit([None, second.address], [ADD, RAISE], "b")  # type: ignore[arg-type]
            last = log.add.submit("c")
            first.wait_for()
            second.wait_for()
            first.open()
            root = get_error(failing)
        later = get_error(begun)
        assert isinstance(later, RoleError)
        assert isinstance(root, RoleError)
        assert later.rank == 1
        assert isinstance(later.__cause__, ValueError)
        assert later.__cause__.args == ("rank 1 was told to raise",)
        assert f"(it was begun before an earlier call had failed: {root.message})" in str(later)
        last.result(PATIENCE_S)
        assert log.read() == [["c"], ["a", "c"]]

    def test_async_failing(self, pair: ColocatedGroup) -> None:
        """An async call that failed on another rank is cancelled on this one; earlier calls complete."""
        log = clear_log(pair)
        with Gate() as mine, Gate() as first, Gate() as second, Gate() as closed:
            going = log.async_at.submit([mine.address] * 2)  # type: ignore[arg-type]
            failing = [
                log.async_at.submit([gate.address, closed.address], failing=0)  # type: ignore[arg-type]
                for gate in (first, second)
            ]
            mine.wait_for(2)
            first.wait_for()
            second.wait_for()
            closed.wait_for(2)
            first.open()
            assert isinstance(get_error(failing[0]), RoleError)
            second.open()  # This failure comes in the hold, which waits for the first call.
            closed.wait_for_none()
            mine.open()
            going.result(PATIENCE_S)
            later = get_error(failing[1])
            assert isinstance(later, RoleError)
            assert isinstance(later.__cause__, ValueError)
            assert log.read() == [["waited"], ["cancelled", "cancelled", "waited"]]

    def test_timeout(self, pair: ColocatedGroup) -> None:
        """A call past its timeout raises CallTimeout with the late rank's stack, and queued calls run afterwards."""
        faulty, log = pair.role("faulty", Faulty), clear_log(pair)
        with Gate() as gate:
            call = faulty.fail_after.options(timeout=1.0).submit([None, gate.address], -1)  # type: ignore[arg-type]
            queued = log.add.submit("queued")
            error = get_error(call)
            assert isinstance(error, CallTimeout)
            assert isinstance(error, TimeoutError)
            assert set(error.stacks) == {1}
            assert "in fail_after" in error.stacks[1]
            assert "pass_gate" in error.stacks[1]
            assert (error.rank, error.group, error.role, error.method) == (1, pair.name, "faulty", "fail_after")
            assert "isn't done after 1.0 s" in str(error)
            assert "in pass_gate" in str(error)
            assert not queued.done()
        queued.result(PATIENCE_S)
        assert log.read() == [["queued"]] * 2

    def test_slow_call(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """A slow call without a timeout is logged with the slow rank's stack, and still returns."""
        monkeypatch.setattr("colocate._api.slow.SLOW_EVERY_S", 0.05)
        monkeypatch.setattr("colocate._calls.order.STACKS_WITHIN_S", PATIENCE_S)  # A busy machine needs longer.
        with self.connect() as runtime, runtime.reserve(1, cpus=0) as pool:
            group = pool.spawn({"faulty": colocate.role(Faulty)})
            with Gate() as gate:
                call = group.role("faulty", Faulty).wait.submit(gate.address)
                gate.wait_for()
                # Set only now: the warning comes once, wherever the rank is.
                monkeypatch.setattr("colocate._api.slow.SLOW_S", 0.05)
                wait_until(lambda: "pass_gate" in caplog.text, "the warning has been given")
            assert call.result(PATIENCE_S) == [0]
        assert "faulty.wait of group" in caplog.text

    def test_rank_that_stays_away(self, spawn: Spawn) -> None:
        """A rank that isn't back within the grace fails the group; the error names the rank and the first failure."""
        group = spawn({"log": colocate.role(Log)})
        log = group.role("log", Log)
        group._node.grace = 0.1
        with Gate() as gate, Gate() as trigger:
            failing = log.at.submit([gate.address, trigger.address], [ADD, RAISE])  # type: ignore[arg-type]
            queued = log.add.submit("never")
            gate.wait_for()
            trigger.open()
            root = get_error(failing)
            error = get_error(queued)
            assert isinstance(error, ColocateError)
            assert "slot 0" in str(error)
            assert "did not stop within 0.1 s" in str(error)
            assert "pass_gate" in str(error)
            assert error.rank == 0
            assert error.__cause__ == root
            with pytest.raises(ColocateError) as again:
                log.add("never")
            assert again.value == error
            group.close(grace=0)


async def _await_call(submit: Callable[[], Call[Any]]) -> weakref.ref[RoleError]:
    try:
        await submit()
    except RoleError as error:  # An error from `asyncio.run` is in a cycle with its own frame.
        return weakref.ref(error)
    raise AssertionError("it went well")


def _get_refusal(ask: Callable[[], object]) -> weakref.ref[RoleError]:
    try:
        ask()
    except RoleError as error:
        return weakref.ref(error)
    raise AssertionError("it went well")


class Failures(order.Failures):
    """Exceptions of roles."""

    @pytest.mark.parametrize("asked", ["called", "result", "exception", "await", "kept", "run"])
    @needs_feature("functions")
    def test_error_let_go_of(self, pair: ColocatedGroup, asked: str) -> None:
        """An error that nobody holds is freed without the garbage collector."""
        faulty = pair.role("faulty", Faulty)

        ways: dict[str, Callable[[], weakref.ref[Any]]] = {
            "called": lambda: _get_refusal(faulty.fail),
            "result": lambda: _get_refusal(lambda: faulty.fail.submit().result(PATIENCE_S)),
            "exception": lambda: weakref.ref(faulty.fail.submit().exception(PATIENCE_S)),
            "await": lambda: asyncio.run(_await_call(faulty.fail.submit)),
            "kept": lambda: _get_refusal(lambda: faulty.fail.keep().fetch()),
            "run": lambda: _get_refusal(lambda: pair.run(_raise_error)),
        }
        collecting = gc.isenabled()
        gc.disable()
        try:
            error_ref = ways[asked]()
            assert becomes_true(lambda: error_ref() is None), gc.get_referrers(error_ref())
        finally:
            if collecting:
                gc.enable()

    def test_traceback(self, pair: ColocatedGroup) -> None:
        """The remote traceback begins in the role's method and ends at the raising line."""
        with pytest.raises(RoleError) as caught:
            pair.role("faulty", Faulty).fail()
        text = caught.value.remote_traceback
        assert text is not None
        lines = [line for line in text.splitlines() if line.strip().startswith("File ")]
        assert lines[0].endswith("in fail")
        assert lines[-1].endswith("in raise_deep_inside")
        assert text.rstrip().endswith("ValueError: ('a plain one', 42)")

    @pytest.mark.parametrize(
        ("kind", "cause"), [("exit", SystemExit), ("interrupt", KeyboardInterrupt), ("generator", GeneratorExit)]
    )
    def test_exceptions_that_are_none(self, pair: ColocatedGroup, kind: str, cause: type[BaseException]) -> None:
        """SystemExit, KeyboardInterrupt or GeneratorExit from a role raises RoleError, and the worker stays alive."""
        with pytest.raises(RoleError) as caught:
            pair.role("faulty", Faulty).fail(kind)
        assert isinstance(caught.value.__cause__, cause)
        assert pair.role("faulty", Faulty).fine() == [0, 1]

    @pytest.mark.parametrize(
        ("kind", "name", "text"),
        [
            ("two", "TwoArguments", "it broke because it was old"),
            ("unpicklable", "Unpicklable", "it holds a lock"),
            ("mute", "Mute", "its __str__ raised"),
            ("mute value", "MuteValue", "its __str__ raised"),
            ("mute runtime", "MuteRuntime", "its __str__ raised"),
            ("frozen", "Frozen", "raised"),
            ("chained", "ValueError", "the last"),
        ],
    )
    def test_odd_exceptions(self, pair: ColocatedGroup, kind: str, name: str, text: str) -> None:
        """An exception that can't be pickled, rebuilt, shown or set is reported by its type, text and place."""
        with pytest.raises(RoleError) as caught:
            pair.role("faulty", Faulty).fail(kind)
        assert name in str(caught.value)
        assert text in str(caught.value)
        assert "in raise_deep_inside" in str(caught.value.remote_traceback)
        assert caught.value.__cause__ is not None
        assert name in f"{type(caught.value.__cause__).__name__} {caught.value.__cause__!r}"
        assert pair.role("faulty", Faulty).fine() == [0, 1]

    def test_pickle(self, pair: ColocatedGroup) -> None:
        """A RoleError survives pickling with its attributes and its cause."""
        with pytest.raises(RoleError) as caught:
            pair.role("faulty", Faulty).fail(ranks=(1,))
        again = pickle.loads(pickle.dumps(caught.value))
        assert str(again) == str(caught.value)
        for name in ("group", "role", "method", "rank", "node", "remote_traceback"):
            assert getattr(again, name) == getattr(caught.value, name), name
        assert again.__cause__.args == ("a plain one", 42)


def _raise_error(ctx: colocate.Context) -> None:
    raise ValueError("a function's")

"""Calls: views, submitting, waiting, options, async methods, cancelling; and plain functions on every worker."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import pickle
import threading
from typing import Any

import pytest
from tests.suite.probes.plain import Plain

import colocate
from colocate import Call, ColocatedGroup, ColocateError
from colocate.errors import CallCancelled, CallTimeout, ConfigError, DispatchError, RoleError
from colocate.testing.executors import calls
from colocate.testing.executors._base import Spawn, needs_feature
from colocate.testing.executors.calls import clear_log
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo, Log
from colocate.testing.probes.rows import Own, Rows
from colocate.testing.waiting import PATIENCE_S, wait_until


class Calls(calls.Calls):
    """Views and their calls."""

    def test_plain_class(self, spawn: Spawn) -> None:
        """A class without colocate's base class can be a role, and has its context by `colocate.context()`."""
        group = spawn({"plain": colocate.role(Plain, 10)}, slots=1)
        assert group[Plain].value() == [10]

    def test_submit(self, pair: ColocatedGroup) -> None:
        """`submit` returns a Call at once, with its result, its error, and whether the call is done."""
        log = clear_log(pair)
        with Gate() as gate:
            call = log.add_at.submit(gate.address, "x")
            gate.wait_for(2)
            assert not call.done()
            with pytest.raises(TimeoutError, match=r"log\.add_at isn't done after 0 s; the call continues"):
                call.result(0)
            with pytest.raises(TimeoutError):
                call.exception(timeout=0)
        assert call.result(PATIENCE_S) == [None, None]
        assert call.done()
        assert call.exception() is None

    def test_done_callback(self, pair: ColocatedGroup) -> None:
        """A done callback runs once, on a thread of the runtime, even if added after the call has ended."""
        heard: list[tuple[Call[Any], int]] = []

        def note(call: Call[Any]) -> None:
            heard.append((call, threading.get_ident()))

        with Gate() as gate:
            call = pair.role("faulty", Faulty).wait.submit(gate.address)
            call.add_done_callback(note)
            assert heard == []
        call.result(PATIENCE_S)
        wait_until(lambda: len(heard) == 1, "the callback has run")
        call.add_done_callback(note)
        wait_until(lambda: len(heard) == 2, "the late callback has run")
        assert [done_call for done_call, _ in heard] == [call, call]
        assert heard[0][1] == heard[1][1] != threading.get_ident()

    def test_await(self, pair: ColocatedGroup) -> None:
        """A call can be awaited in any event loop, and raises its error there."""

        async def main() -> list[Any]:
            echo, faulty = pair.role("echo", Echo), pair.role("faulty", Faulty)
            values = await asyncio.gather(*(_await_call(echo.first.submit(index)) for index in range(3)))
            with pytest.raises(RoleError, match="a plain one"):
                await faulty.fail.submit()
            return values

        assert asyncio.run(main()) == [0, 1, 2]

    def test_wait(self, pair: ColocatedGroup) -> None:
        """`colocate.wait` returns the calls that are done and the calls that are pending."""
        echo, faulty = pair.role("echo", Echo), pair.role("faulty", Faulty)
        with Gate() as gate:
            done = [echo.noop.submit(), faulty.fine.submit()]
            late = faulty.wait.submit(gate.address)
            assert colocate.wait(done, timeout=PATIENCE_S) == (set(done), set())
            assert colocate.wait([*done, late], timeout=0) == (set(done), {late})
        assert colocate.wait([late], timeout=PATIENCE_S) == ({late}, set())

    def test_as_completed(self, pair: ColocatedGroup) -> None:
        """`colocate.as_completed` yields each call once, when it is done, and raises TimeoutError at the timeout."""
        left_rows, right = pair.role("left", Rows), pair.role("right", Rows)
        log = clear_log(pair)
        with Gate() as gate:
            calls = [right.produce.submit(1), left_rows.produce.submit(1)]
            late = log.add_at.submit(gate.address, "late")
            completed = colocate.as_completed([*calls, late], timeout=PATIENCE_S)
            assert {next(completed), next(completed)} == set(calls)
            with pytest.raises(TimeoutError):
                next(colocate.as_completed([late], timeout=0))
            gate.open()
            assert list(completed) == [late]

    def test_options_add_up(self, pair: ColocatedGroup) -> None:
        """Later options keep earlier ones in either order, and replace an earlier value of the same option."""
        faulty = pair.role("faulty", Faulty)
        for options in (
            faulty.wait.options(timeout=0.05).options(ranks=[1]),
            faulty.wait.options(ranks=[1]).options(timeout=0.05),
            faulty.wait.options(timeout=math.inf, ranks=[0]).options(timeout=0.05).options(ranks=[1]),
        ):
            with Gate() as gate:
                call = options.submit(gate.address)
                with pytest.raises(CallTimeout) as caught:
                    call.result(PATIENCE_S)
                assert list(caught.value.stacks) == [1]

    def test_ranks(self, pair: ColocatedGroup) -> None:
        """`options(ranks=…)` runs a call on these ranks only, with arguments and results in the order given."""
        rows, echo = pair.role("rows", Rows), pair.role("echo", Echo)
        assert [fact["rank"] for fact in echo.who.options(ranks=[1])()] == [1]
        assert [fact["rank"] for fact in echo.who.options(ranks=[1, 0])()] == [1, 0]
        assert rows.each.options(ranks=[1])(["for one"]) == [(1, "for one", None)]
        assert rows.each.options(ranks=[1, 0])(["for one", "for zero"]) == [(1, "for one", None), (0, "for zero", None)]
        assert rows.on_one.options(ranks=[0])("moved") == (0, "moved")
        assert echo.first.options(ranks=[1]).submit("b").result(PATIENCE_S) == "b"
        with echo.echo.options(ranks=[1]).keep("c") as resident:
            assert resident.fetch() == ["c"]

    def test_wrong_ranks(self, pair: ColocatedGroup) -> None:
        """Unknown, repeated or no ranks raise DispatchError, and so do ranks for a method that scatters."""
        for ranks in ([2], [-1], [0, 0], []):
            with pytest.raises(DispatchError, match="rank"):
                pair.role("echo", Echo).noop.options(ranks=ranks)()
        with pytest.raises(DispatchError, match="Broadcast, PerRank and OnRank"):
            pair.role("rows", Rows).double.options(ranks=[0])([1, 2])

    def test_signatures(self, pair: ColocatedGroup) -> None:
        """A method may have every kind of Python parameter; wrong arguments raise TypeError on the driver."""
        own_view = pair.role("own", Own)
        assert own_view.signature(1, c=3) == (1, 2, (), 3, {})
        assert own_view.signature(1, 5, 6, 7, c=3, d=4) == (1, 5, (6, 7), 3, {"d": 4})
        with pytest.raises(TypeError, match="missing a required"):
            own_view.signature(1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match=r"add.*got an unexpected keyword argument 'wrong'"):
            pair.role("log", Log).add(1, wrong=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]

    def test_wrong_method(self, pair: ColocatedGroup) -> None:
        """A name that is no role method raises AttributeError on a view; the error lists the methods."""
        with pytest.raises(AttributeError, match=r"role 'echo' has no method 'ecko'.*did you mean 'echo'"):
            pair.role("echo").ecko()
        with pytest.raises(AttributeError, match="is_alive, noop"):
            _ = pair.role("echo").tag

    def test_views_are_names(self, pair: ColocatedGroup) -> None:
        """A view has the role's methods alone and can't be written to; `colocate.inspect` describes its role."""
        view = pair.role("log", Log)
        assert view is pair["log"] is pair[Log]
        assert set(dir(view)) == set(colocate.inspect(view).methods) >= {"add", "read"}
        with pytest.raises(AttributeError, match="can't be written to"):
            view.entries = []
        info = colocate.inspect(pair.role("right"))
        assert (info.group, info.role, info.cls, info.ranks) == (pair.name, "right", Rows, 1)
        assert info.meshes == {"": {"dp": 1}}
        assert "double(batch" in info.methods["double"]

    def test_wrong_role(self, pair: ColocatedGroup) -> None:
        """Asking for a missing role, a wrong class or an ambiguous class raises a ConfigError that says so."""
        with pytest.raises(ConfigError, match="has no role 'ecko': it has echo, other"):
            pair.role("ecko")
        with pytest.raises(ConfigError, match=r"role 'echo' .* is a .*:Echo, and no .*:Rows"):
            pair.role("echo", Rows)
        with pytest.raises(ConfigError, match="2 roles of class Echo"):
            pair[Echo]

    def test_nothing_is_sent_by_accident(self, pair: ColocatedGroup) -> None:
        """Views, calls, groups, pools and runtimes can't be pickled or be arguments; residents can't be pickled."""
        echo = pair.role("echo", Echo)
        call = echo.noop.submit()
        with echo.echo.keep(1) as resident:
            for thing in (echo, echo.noop, call, resident, resident.ref, pair, pair.owner, pair.owner.owner):
                with pytest.raises(TypeError, match=r"can't be (sent|pickled)"):
                    pickle.dumps(thing)
        for thing in (echo, echo.noop, call, pair, pair.owner, pair.owner.owner):
            with pytest.raises(TypeError, match="lives on the driver and can't be an argument"):
                echo.echo([{"inside": thing}])

    def test_call_from_a_worker(self, pair: ColocatedGroup) -> None:
        """A role's call of a view inside a worker is refused, since its lane would wait for itself."""
        with pytest.raises(RoleError, match="from inside a worker") as caught:
            pair.role("echo", Echo).call_a_view()
        assert isinstance(caught.value.__cause__, ColocateError)

    def test_async_limit(self, pair: ColocatedGroup) -> None:
        """Async calls of a method overlap no more than its concurrency allows."""
        log = clear_log(pair)
        with Gate() as gate:
            calls = [log.peak.submit(gate.address) for _ in range(4)]
            gate.wait_for(4)  # Two calls run on each of two ranks.
        colocate.wait(calls, timeout=PATIENCE_S)
        for entries in log.read():
            running = [entries[: index + 1].count("in") - entries[: index + 1].count("out") for index in range(8)]
            assert max(running) == 2

    def test_sync_is_a_barrier(self, pair: ColocatedGroup) -> None:
        """A sync method waits for earlier async calls, and later async calls wait for the sync method."""
        log = clear_log(pair)
        with Gate() as gate:
            log.async_add.submit("a", gate.address)
            log.add.submit("b")
            last = log.async_add.submit("c")
            gate.wait_for(2)
        last.result(PATIENCE_S)
        assert log.read() == [["begin a", "end a", "b", "begin c", "end c"]] * 2


async def _await_call(call: Call[Any]) -> Any:
    return await call


class Cancelling(calls.Cancelling):
    """Calls that are cancelled by `call.cancel()`."""

    def test_cancel_queued(self, pair: ColocatedGroup) -> None:
        """Cancelling withdraws a queued call from every rank; earlier and later calls run."""
        log = clear_log(pair)
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

    def test_cancel_kept(self, pair: ColocatedGroup) -> None:
        """The resident of a cancelled call raises CallCancelled, and a call that uses the resident fails, too."""
        log, rows = clear_log(pair), pair.role("rows", Rows)
        with Gate() as gate, pair.scope():
            log.add_at.submit(gate.address, "first")
            gate.wait_for(2)
            resident = rows.double.keep([1, 2])
            used = rows.double.submit(resident.ref)
            assert resident._kept.call.cancel()  # type: ignore[attr-defined]
            gate.open()
            with pytest.raises((CallCancelled, RoleError)):
                used.result(PATIENCE_S)
            with pytest.raises(CallCancelled):
                resident.fetch()
            assert log.read() == [["first"], ["first"]]

    @needs_feature("functions")
    def test_a_default_deadline(self, no_leaks: None) -> None:
        """`call_timeout` is the timeout of every call without its own; `math.inf` turns the timeout off."""
        with self.connect(call_timeout=0.2) as runtime:
            group = runtime.reserve(1, cpus=0).spawn({"faulty": colocate.role(Faulty)})
            wait = group.role("faulty", Faulty).wait
            with Gate() as gate:
                patient = wait.options(timeout=math.inf).submit(gate.address)
                assert isinstance(wait.submit(gate.address).exception(PATIENCE_S), CallTimeout)
                with pytest.raises(CallTimeout, match=r"0\.2 s"):
                    group.run(lambda ctx: None)
            patient.result(PATIENCE_S)

"""Pipelines: the fate of their calls when sending fails, a group closes, or a hold is under way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

import colocate
from colocate import Call, ColocatedGroup, ColocateError
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S

PROCESSES = pytest.mark.parametrize("groups", [True], indirect=True)


@pytest.fixture(params=[False])
def groups(request: pytest.FixtureRequest) -> Iterator[tuple[ColocatedGroup, ColocatedGroup]]:
    """Yield a group of two slots and a group of one, in processes or not."""
    roles = {"echo": colocate.role(Echo), "rows": colocate.role(Rows), "faulty": colocate.role(Faulty)}
    with (
        colocate.connect("local", processes=request.param) as runtime,
        runtime.reserve(2) as two,
        runtime.reserve(1) as one,
    ):
        yield two.spawn(roles), one.spawn(roles)


def failing(monkeypatch: pytest.MonkeyPatch, group: ColocatedGroup, slot: int) -> None:
    """Make a worker's host fail once, when a call is sent."""
    host: Any = group._node.workforce.workers[slot].host
    executor = group._node.services.executor
    send, numbered = host.send, executor.numbered
    calls: list[Any] = []

    def noted(message: Any, body: Any) -> Any:
        made = numbered(message, body)
        calls.append(made[0])
        return made

    def fail(frame: Any) -> None:
        if not any(each is frame for each in calls):
            send(frame)
            return
        monkeypatch.setattr(host, "send", send)
        raise MemoryError("no memory for it")

    monkeypatch.setattr(executor, "numbered", noted)
    monkeypatch.setattr(host, "send", fail)


@PROCESSES
def test_sending_fails(groups: tuple[ColocatedGroup, ColocatedGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that reached only some of their workers are withdrawn from these, and the groups stay usable.

    Earlier calls that use a result which is never made fail instead of waiting.
    """
    first, second = groups
    calls: list[Call[Any]] = []

    def alone() -> None:
        with first.pipeline():
            kept = first.role("rows", Rows).double.keep([1, 2])
            calls.append(first.role("echo", Echo).echo.submit(kept.ref))

    def together() -> None:
        with first.pipeline(), second.pipeline():
            made = first.role("rows", Rows).double.keep([1, 2])
            there = second.role("rows", Rows).double.keep(made.ref)
            calls.append(first.role("rows", Rows).double.submit(there.ref))

    for block, group, slot, error in (
        (alone, first, 0, MemoryError),
        (alone, first, 1, MemoryError),
        (together, second, 0, ColocateError),
    ):
        failing(monkeypatch, group, slot)
        with pytest.raises(MemoryError):
            block()
        assert isinstance(calls.pop().exception(PATIENCE_S), error)
        for each in groups:
            assert each.role("echo", Echo).first(1) == 1
            assert each.role("rows", Rows).double([1, 2]) == [2, 4]


def test_a_closed_group_keeps_all_from_being_sent(groups: tuple[ColocatedGroup, ColocatedGroup]) -> None:
    """A pipeline over several groups sends no call if one of the groups is closed at the block's end."""
    first, second = groups
    echo = first.role("echo", Echo)
    calls: list[Call[Any]] = []

    def block() -> None:
        with first.pipeline(), second.pipeline():
            calls.append(echo.tracked.submit())
            calls.append(second.role("echo", Echo).noop.submit())
            second.close()

    with pytest.raises(colocate.ClosedError):
        block()
    assert [type(call.exception(PATIENCE_S)) for call in calls] == [colocate.ClosedError] * 2
    assert echo.is_alive() == [False, False]


def test_closing_a_lender_by_force(groups: tuple[ColocatedGroup, ColocatedGroup]) -> None:
    """A call in an open pipeline borrows like a sent call, and fails if a forced close ends the lender."""
    first, second = groups
    echo = first.role("echo", Echo)
    kept = second.role("echo", Echo).first.keep("theirs")
    with first.pipeline():
        use = echo.first.submit(kept.ref)
        again = echo.first.keep(kept.ref)
        further = echo.first.submit(again.ref)
        other = echo.first.submit("own")
        with pytest.raises(colocate.BorrowedError, match=r"echo\.first of group"):
            second.close()
        second.close(force=True)
    assert other.result(PATIENCE_S) == "own"
    for call in (use, further):
        error = call.exception(PATIENCE_S)
        assert isinstance(error, ColocateError)
        assert "was closed by" in str(error)
    with pytest.raises(ColocateError, match="was closed by"):
        again.fetch()


def test_not_recorded(groups: tuple[ColocatedGroup, ColocatedGroup]) -> None:
    """A call that is refused when it is made leaves the rest of its pipeline intact."""
    group, _ = groups
    echo, rows = group.role("echo", Echo), group.role("rows", Rows)
    freed = rows.double.keep([1, 2])
    freed.free()
    with group.pipeline():
        before = echo.first.submit(1)
        for refused in (
            lambda: rows.double.submit([1]),
            lambda: rows.double.submit(freed.ref),
            lambda: echo.first.submit(),  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        ):
            with pytest.raises((ColocateError, TypeError)):
                refused()
        after = echo.first.submit(2)
    assert (before.result(PATIENCE_S), after.result(PATIENCE_S)) == (1, 2)


def test_behind_a_hold(groups: tuple[ColocatedGroup, ColocatedGroup]) -> None:
    """A pipeline that is sent during a hold runs after the hold."""
    group, _ = groups
    faulty, echo = group.role("faulty", Faulty), group.role("echo", Echo)
    with Gate() as failing, Gate() as gate:
        failed = faulty.fail_after.submit([failing.address, gate.address], failing=0)
        gate.wait_for()  # Rank 1 has begun: otherwise it would skip the failed call, and the hold would be over.
        failing.open()
        assert isinstance(failed.exception(PATIENCE_S), colocate.RoleError)
        with group.pipeline():
            calls = [echo.first.submit(index) for index in range(5)]
        assert not any(call.done() for call in calls)
    assert [call.result(PATIENCE_S) for call in calls] == list(range(5))


def test_while_another_thread_imports_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline works while another thread has asyncio half imported."""
    part = ModuleType("asyncio")
    part.__spec__ = ModuleSpec("asyncio", None)
    part.__spec__._initializing = True  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    with colocate.connect() as runtime, runtime.reserve(slots=1) as pool:
        group = pool.spawn({"echo": colocate.role(Echo)})
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "asyncio", part)
            with group.scope(), group.pipeline():
                call = group.role("echo", Echo).first.submit(1)
            assert call.result(PATIENCE_S) == 1

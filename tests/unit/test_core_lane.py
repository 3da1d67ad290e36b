"""The lane, with role code that misbehaves."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import colocate
from colocate import CallTimeout, ColocatedGroup, Role, RoleError, WorkerDied, method
from colocate.testing.gate import Address, Gate, pass_gate
from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate.worker.serving import failure


class Strange(Role):
    @method
    async def leave_in_task(self) -> None:
        async def leave() -> None:
            await asyncio.sleep(0)
            sys.exit(3)

        await asyncio.create_task(leave())

    @method
    async def fine(self) -> int:
        await asyncio.sleep(0)
        return self.ctx.rank

    @method
    def take(self, value: Any) -> None:
        return

    @method
    def fail(self) -> None:
        raise ValueError("on purpose")

    @method
    def meet(self, gate: Address | None) -> float:
        import torch
        import torch.distributed as dist

        group, value = self.ctx.process_group(), torch.ones(1)
        dist.all_reduce(value, group=group)
        if gate is not None:
            pass_gate(gate)
        dist.all_reduce(value, group=group)
        return value.item()


class Large:
    pass


class AsksAtItsEnd:
    """Has the worker ask its driver for a module, just when a call has told its end."""

    def __del__(self) -> None:
        import tests.unit.counted  # noqa: F401


@pytest.fixture(params=[False, True], ids=["threads", "processes"])
def group(request: pytest.FixtureRequest) -> Iterator[ColocatedGroup]:
    with colocate.connect("local", processes=request.param) as runtime, runtime.reserve(2) as pool:
        yield pool.spawn({"strange": colocate.role(Strange)})


def test_exit_in_task(group: ColocatedGroup) -> None:
    """SystemExit in a task that an async method has made, which stops an event loop, is that call's error only."""
    strange = group.role("strange", Strange)
    with pytest.raises(RoleError, match="SystemExit"):
        strange.leave_in_task.submit().result(PATIENCE_S)
    assert strange.fine.submit().result(PATIENCE_S) == [0, 1]


def test_an_argument_that_asks_at_its_end(group: ColocatedGroup) -> None:
    """What it is answered is heard, and so are later calls."""
    strange = group.role("strange", Strange)
    for _ in range(2):
        strange.take.submit(AsksAtItsEnd()).result(PATIENCE_S)
        assert strange.fine() == [0, 1]


def test_arguments_are_let_go() -> None:
    """A lane that waits for work keeps nothing of the last one."""
    with colocate.connect("local") as runtime:
        strange = runtime.reserve(1).spawn({"strange": colocate.role(Strange)}).role("strange", Strange)
        value = Large()
        gone = weakref.ref(value)
        strange.take(value)
        del value
        wait_until(lambda: gc.collect() >= 0 and gone() is None, "the argument is freed")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that breaks, by a mistake of colocate's own, fails its group; nobody waits for it for ever."""

    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("a mistake in colocate")

    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    with colocate.connect("local") as runtime:
        strange = runtime.reserve(1).spawn({"strange": colocate.role(Strange)}).role("strange", Strange)
        monkeypatch.setattr(failure, "failed", broken)
        with pytest.raises(WorkerDied):
            strange.fail.submit().result(PATIENCE_S)


def test_late_behind_a_collective() -> None:
    """A queued call that runs out of time cuts nothing from the one before it."""
    pytest.importorskip("torch")
    with colocate.connect("local", processes=True) as runtime, Gate() as gate:
        strange = runtime.reserve(2).spawn({"strange": colocate.role(Strange)}).role("strange", Strange)
        meeting = strange.meet.submit(gate.address)
        gate.wait_for(2)
        with pytest.raises(CallTimeout):
            strange.fine.options(timeout=0.01)()
        gate.open()
        assert meeting.result(PATIENCE_S) == [4.0, 4.0]
        assert strange.meet(None) == [4.0, 4.0]

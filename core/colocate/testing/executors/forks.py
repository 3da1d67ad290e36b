"""Forked children of the driver: they own nothing, use nothing, close nothing, and hold nothing open."""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import Call, ColocatedGroup, Runtime
from colocate.errors import ClosedError, ForkedError
from colocate.testing.executors._base import ExecutorCase
from colocate.testing.forking import exit_code, fork
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S


class Forks(ExecutorCase):
    """A forked child has copies of the driver's objects, and none of its rights."""

    def test_fork(self, runtime: Runtime, pair: ColocatedGroup, tmp_path: Path) -> None:
        """In a forked child every live object refuses use and closes nothing; the parent goes on."""
        runtime.audit()
        echo, faulty = pair.role("echo", Echo), pair.role("faulty", Faulty)
        kept = echo.first.keep("kept")
        kept.fetch()
        with Gate() as gate:
            call = faulty.wait.submit(gate.address)
            gate.wait_for(2)
            uses: dict[str, Callable[[], object]] = {
                "runtime.reserve": lambda: runtime.reserve(1),
                "runtime.close": runtime.close,
                "runtime.audit": runtime.audit,
                "pool.spawn": lambda: pair.owner.spawn({"echo": colocate.role(Echo)}),
                "spawn on a part": lambda: pair.owner[0:1].spawn({"echo": colocate.role(Echo)}),
                "forced": lambda: runtime.close(force=True),
                "pool.close": pair.owner.close,
                "group.close": pair.close,
                "call": echo.noop,
                "submit": echo.noop.submit,
                "keep": echo.noop.keep,
                "fetch": kept.fetch,
                "free": kept.free,
                "use": lambda: echo.first(kept.ref),
                "spec": lambda: kept.spec,
                "result": call.result,
                "exception": call.exception,
                "cancel": call.cancel,
                "callback": lambda: call.add_done_callback(print),
                "await": lambda: asyncio.run(_awaited(call)),
                "wait": lambda: colocate.wait([call], PATIENCE_S),
                "as_completed": lambda: list(colocate.as_completed([call], PATIENCE_S)),
                "audit": runtime.audit,
                "checkpoint": lambda: pair.checkpoint(tmp_path),
                "wait_ready": lambda: pair.wait_ready(PATIENCE_S),
                "scope": lambda: pair.scope().__enter__(),
                "pipeline": lambda: pair.pipeline().__enter__(),
                "run": lambda: pair.run(_nothing),
            }
            assert in_a_fork(lambda: [name for name, use in uses.items() if not refuses(use)]) == []

            def leave_everything() -> list[str]:
                with pair, pair.owner, runtime, kept:
                    pass
                return [each.name for each in (pair, pair.owner, runtime) if each._node.closed_by is not None]

            assert in_a_fork(leave_everything) == []
        assert call.result(PATIENCE_S) == [0, 1]
        assert kept.fetch() == "kept"
        assert echo.noop() == [None, None]
        kept.free()

    def test_blocks_of_a_fork(self, pair: ColocatedGroup) -> None:
        """A scope, a pipeline and a resident that were open when it was forked: leaving them there does nothing."""
        echo = pair.role("echo", Echo)
        with pair.scope(), echo.first.keep("kept") as kept:
            with pair.pipeline():
                inside = echo.first.submit(kept.ref)
                child = fork()
            if child == 0:  # it has left the pipeline, and ends at the end of the scope, as if by itself
                pass
        if child == 0:
            os._exit(7)
        assert exit_code(child) == 7
        assert inside.result(PATIENCE_S) == "kept"
        with pytest.raises(ClosedError):
            kept.fetch()

    def test_new_runtime_in_a_fork(self, pair: ColocatedGroup) -> None:
        """A forked child may connect for itself."""

        def use_a_new_one() -> list[str]:
            with colocate.connect("local") as runtime, runtime.reserve(1) as pool:
                return pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).echo("from the child")

        assert in_a_fork(use_a_new_one) == ["from the child"]
        assert pair.role("echo", Echo).noop() == [None, None]


def refuses(use: Callable[[], object]) -> bool:
    """Whether a use is refused since this is a forked child."""
    try:
        use()
    except ForkedError as error:
        return "fork" in str(error)
    except BaseException:  # or it found something else to complain of
        return False
    return False


def in_a_fork(function: Callable[[], list[str]]) -> list[str]:
    """What a function returns in a forked child, as text."""
    read, write = os.pipe()
    child = fork()
    if child == 0:
        try:
            said = json.dumps(function())
        except BaseException:
            said = json.dumps([traceback.format_exc()])
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    exit_code(child)
    with open(read, "rb") as answer:
        found: list[str] = json.loads(answer.read())
    return found


async def _awaited(call: Call[Any]) -> Any:
    return await call


def _nothing(ctx: colocate.Context) -> None:
    """A function that does nothing."""

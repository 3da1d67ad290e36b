"""Forked children of the driver, which own nothing."""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable

import pytest
from tests.forking import exit_code, fork

import colocate
from colocate import ColocatedGroup
from colocate.errors import ClosedError, ForkedError, RoleError
from colocate.testing.executors._base import ExecutorCase, needs_feature
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S


class Forks(ExecutorCase):
    """A forked child has copies of the driver's objects, and none of its rights."""

    @needs_feature("pipelines")
    def test_blocks_of_a_fork(self, pair: ColocatedGroup) -> None:
        """A forked child leaves open blocks without an effect, even if a thread of its parent held the group's lock."""
        echo, lock = pair.role("echo", Echo), pair._node.order.lock
        is_held, go_on = threading.Event(), threading.Event()

        def hold_lock() -> None:
            with lock:
                is_held.set()
                assert go_on.wait(PATIENCE_S)

        holder = threading.Thread(target=hold_lock)
        with pair.scope(), echo.first.keep("kept") as resident, pair.pipeline():
            inside = echo.first.submit(resident.ref)
            holder.start()
            assert is_held.wait(PATIENCE_S)
            child = fork()
            go_on.set()
            # The child leaves the pipeline, the resident's block and the scope here.
        if child == 0:
            os._exit(7)
        holder.join()
        assert exit_code(child) == 7
        assert inside.result(PATIENCE_S) == "kept"
        with pytest.raises(ClosedError):
            resident.fetch()

    def test_a_failed_resident_in_a_fork(self, pair: ColocatedGroup) -> None:
        """A forked child's use of a failed resident raises ForkedError, not the resident's error."""
        echo, resident = pair.role("echo", Echo), pair.role("faulty", Faulty).fail.keep()
        with pytest.raises(RoleError):
            resident.wait()

        def use_it() -> list[str]:
            with pytest.raises(ForkedError):
                echo.echo(resident.ref)
            return ["refused"]

        assert run_in_fork(use_it) == ["refused"]

    def test_new_runtime_in_a_fork(self, pair: ColocatedGroup) -> None:
        """A forked child may connect a runtime of its own."""

        def use_a_new_one() -> list[str]:
            with colocate.connect("local") as runtime, runtime.reserve(1) as pool:
                return pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).echo("from the child")

        assert run_in_fork(use_a_new_one) == ["from the child"]
        assert pair.role("echo", Echo).noop() == [None, None]


def run_in_fork(function: Callable[[], list[str]]) -> list[str]:
    """Return a function's result, or its traceback, from a forked child."""
    read, write = os.pipe()
    child = fork()
    if child == 0:
        try:
            reply = json.dumps(function())
        except BaseException:
            reply = json.dumps([traceback.format_exc()])
        os.write(write, reply.encode())
        os._exit(0)
    os.close(write)
    exit_code(child)
    with open(read, "rb") as answer:
        result: list[str] = json.loads(answer.read())
    return result

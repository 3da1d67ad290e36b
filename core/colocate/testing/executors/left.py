"""Tests of tasks, timers and servers that role code leaves in its event loop between calls."""

from __future__ import annotations

import socket

import pytest

import colocate
from colocate.errors import RoleError
from colocate.testing.executors._base import ExecutorCase, Spawn, needs_feature, smoke
from colocate.testing.gate import Gate
from colocate.testing.probes.left import Leaves, Server
from colocate.testing.waiting import PATIENCE_S, wait_until


class LeftInLoops(ExecutorCase):
    """Tasks, timers and servers in a role's event loop continue between calls."""

    @smoke
    @pytest.mark.parametrize("background", [False, True])
    @needs_feature("pausing")
    def test_a_task_goes_on_between_calls(self, spawn: Spawn, background: bool) -> None:
        """A task continues after the method that started it, also after a failed call and while the lane is paused."""
        group = spawn({"leaves": colocate.role(Leaves).on(background=background)})
        leaves = group.role("leaves", Leaves)
        for begins in (leaves.comes_to, leaves.begins):
            with Gate() as gate:
                begins(gate.address)
                gate.wait_for(2)
        with Gate() as gate:
            leaves.comes_to(gate.address)
            with pytest.raises(RoleError, match="a method"):
                leaves.raises()
            gate.wait_for(2)
        if background:
            with Gate() as gate:
                leaves.begins(gate.address)
                group.pause("leaves")
                gate.wait_for(2)
                group.resume("leaves")

    def test_a_server_answers_between_calls(self, spawn: Spawn) -> None:
        """A server and a timer that a role starts in its constructor continue between calls."""
        with Gate() as gate:
            server = spawn({"server": colocate.role(Server, gate.address)}, slots=1).role("server", Server)
            gate.wait_for()
            address = server.address()
            for _ in range(2):
                with socket.create_connection(address, PATIENCE_S) as client:
                    client.sendall(b"hello\n")
                    assert client.makefile().readline() == "HELLO\n"

    def test_failed_task_is_reported(
        self, spawn: Spawn, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        """The error of a failed task is reported at once, in the way of asyncio."""
        group = spawn({"leaves": colocate.role(Leaves)}, slots=1)
        group.role("leaves", Leaves).fails("a task went wrong")
        outputs: list[str] = []

        def is_said() -> bool:
            outputs.extend((*capfd.readouterr(), caplog.text))  # Workers on threads log into `caplog`.
            return "a task went wrong" in "".join(outputs)

        wait_until(is_said, "it is told")
        assert "never retrieved" in "".join(outputs)

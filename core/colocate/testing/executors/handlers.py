"""Signals, event loops and forks in role code: as in a script, where a worker has a process of its own."""

from __future__ import annotations

import pytest

import colocate
from colocate import Runtime
from colocate.errors import RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import Spawn, needs
from colocate.testing.executors.drivers import Scripted
from colocate.testing.probes.forking import Sandbox
from colocate.testing.probes.limited import Late, Limited, Looped, answer, is_late
from colocate.testing.waiting import PATIENCE_S


class Handlers(Scripted):
    """What role code expects of the thread that it runs on."""

    def test_a_limit_of_time(self, spawn: Spawn, runtime: Runtime) -> None:
        """A method may limit its time by an alarm. Where its thread isn't the main one the error says what to do."""
        group = spawn({"limited": colocate.role(Limited)}, slots=1)
        limited = group.role("limited", Limited)
        if isinstance(runtime._node.services.executor, OwnProcess):
            assert limited.score()
            assert limited.score_step()
            assert group.run(lambda ctx: is_late()) == [True]
            return
        with pytest.raises(RoleError, match=r"signal only works in main thread(.|\n)*processes=True"):
            limited.score()

    @needs(OwnProcess)
    def test_an_error_of_the_call(self, spawn: Spawn) -> None:
        """What a handler raises is the error of the call, wherever the signal comes, and of no other."""
        limited = spawn({"limited": colocate.role(Limited)}, slots=1).role("limited", Limited)
        for call in (limited.overruns, limited.awaits, limited.returns_slowly):
            with pytest.raises(RoleError, match="too late") as caught:
                call()
            assert isinstance(caught.value.__cause__, Late)
        assert limited.seen() == [False]  # what was awaited has been cancelled

    def test_event_loops(self, spawn: Spawn) -> None:
        """There is a current loop, in which async methods run, whatever roles have done with it before."""
        group = spawn({"looped": colocate.role(Looped), "other": colocate.role(Looped)}, slots=1)
        looped, other = group.role("looped", Looped), group.role("other", Looped)
        assert looped.asks() == 42
        assert looped.waits() == "done"
        assert other.runs() == 42
        assert group.run(answer) == [42]
        assert looped.asks() == 42
        assert other.waits() == "done"
        other.closes()
        assert looped.awaits() == 42
        assert looped.asks() == 42

    @pytest.mark.parametrize(("how", "code"), [("exit", 5), ("text", 1), ("raise", 1), ("return", 0)])
    def test_a_fork_that_leaves_role_code(self, spawn: Spawn, how: str, code: int) -> None:
        """It ends, by the code that a script would have; the worker goes on."""
        sandbox = spawn({"sandbox": colocate.role(Sandbox)}, slots=1).role("sandbox", Sandbox)
        for fork in (sandbox.forked, sandbox.forked_amid):
            assert fork.submit(how).result(PATIENCE_S) == code

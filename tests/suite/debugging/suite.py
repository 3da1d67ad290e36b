"""Ranks that stop in a debugger: terminals, suspended deadlines, and ends of groups, workers and terminals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import pytest
from tests.suite.debugging.probes import Stopper
from tests.suite.marks import mark_executor_part

import colocate
from colocate import ColocatedGroup
from colocate.driver import Driver
from colocate.errors import CallTimeout, ClosedError, ConfigError, RoleError, RoleStartError, WorkerDied
from colocate.executor import OwnProcess
from colocate.features.debugging.attach import AttachedTerminal, attach, list_stopped_drivers
from colocate.features.debugging.terminal import send_message
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.executors.placement import find_free_ports
from colocate.testing.gate import Gate
from colocate.testing.waiting import PATIENCE_S, wait_until

_SHOWN_WITHIN_S = 20.0
_PORTS = 24


class Terminal:
    """A test's stand-in for `colocate debug`; its close is like the end of a killed terminal."""

    def __init__(self, which: str = "1") -> None:
        attached: list[AttachedTerminal] = []

        def come() -> bool:
            try:
                tried = attach(os.getpid(), which)
            except ConfigError:  # No rank has stopped yet.
                return False
            if tried.stopped_ranks is None:
                attached.append(tried)
            else:
                tried.close()
            return bool(attached)

        wait_until(come, f"rank {which} is stopped")
        self._attached = attached[0]
        self._attached.sock.settimeout(_SHOWN_WITHIN_S)
        self.output = self._read_until_prompt(self._attached.first)

    def type_line(self, line: str | None) -> str:
        """Type a line (None: end of input), and return the output up to the next prompt or the end."""
        send_message(self._attached.sock, {"line": line})
        return self.read_until_prompt()

    def resume(self, line: str | None) -> None:
        """Type a line that resumes the rank, and wait until the rank runs."""
        send_message(self._attached.sock, {"line": line})
        self.read_until("goes on")

    def read_until_prompt(self) -> str:
        """Return the output up to the next prompt."""
        return self._read_until_prompt({"text": "", "asks": False})

    def _read_until_prompt(self, told: Any) -> str:
        shown = told["text"]
        while not told["asks"] and (line := self._attached.lines.readline()):
            told = json.loads(line)
            if "over" in told:
                return f"{shown}{told['over']}"
            shown += told["text"]
        return str(shown)

    def read_until(self, words: str) -> str:
        """Return the output up to some words."""
        shown = ""
        while words not in shown:
            line = self._attached.lines.readline()
            assert line, shown
            shown += json.loads(line).get("text", json.loads(line).get("over", ""))
        return shown

    def read_all(self) -> None:
        """Read the output to its end."""
        while self._attached.lines.readline():
            pass

    def close(self) -> None:
        self._attached.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@needs(OwnProcess)
class Debugging(ExecutorCase):
    """`breakpoint()` in role code, and `connect(debug=True)`."""

    @pytest.fixture
    def stoppers(self, spawn: Spawn) -> ColocatedGroup:
        """Spawn a group whose ranks stop."""
        return spawn({"stopper": colocate.role(Stopper)})

    @mark_executor_part
    def test_a_rank_stops(self, stoppers: ColocatedGroup) -> None:
        """A stopped rank shows its line and variables, can be stepped, and continues with changed values."""
        role = stoppers.role("stopper", Stopper)
        call = role.step.submit(1)
        with Terminal("stopper/1") as terminal:
            assert "stopper.step on rank 1 of group" in terminal.output
            assert terminal.output.endswith("-> total += 10\n(stopper.step rank 1) ")
            assert terminal.type_line("p total").startswith("2\n")
            assert "-> return self.add_more(total)" in terminal.type_line("next")
            assert "--Call--" in terminal.type_line("step")
            assert "-> return value + 100" in terminal.type_line("next")
            stack = terminal.type_line("where")
            assert stack.count("probes.py") == 2
            assert stack.count(".py(") == 2  # No frames of colocate.
            terminal.type_line("!value = 1000")
            terminal.resume("continue")
        assert call.result(PATIENCE_S) == [111, 1100]
        assert role.step(1, ranks=()) == [111, 112]

    def test_steps_out_of_role_code(self, stoppers: ColocatedGroup) -> None:
        """A step out of a method resumes the rank, without a stop in colocate's code or in the next call."""
        role = stoppers.role("stopper", Stopper)
        for method, last in (role.step, "-> return self.add_more(total)"), (role.step_async, "-> return value"):
            call = method.submit(1)
            with Terminal() as terminal:
                while last not in terminal.output:
                    terminal.output = terminal.type_line("next")
                if method is role.step:
                    assert "--Return--" in terminal.type_line("next")
                terminal.resume("next")
            call.result(PATIENCE_S)
            assert role.step(1, ranks=()) == [111, 112]
        wait_until(lambda: not stoppers._node.stopped_slots(), "nothing is stopped")

    @pytest.mark.parametrize("how", ["killed", "detached"])
    def test_a_terminal_goes(self, stoppers: ColocatedGroup, how: str) -> None:
        """A killed or detached terminal resumes the call without the terminal's breakpoints, and another can attach."""
        role = stoppers.role("stopper", Stopper)
        call = role.step.submit(1)
        with Terminal() as terminal:
            assert "Breakpoint" in terminal.type_line("break Stopper.add_more") or "Breakpoint" in terminal.type_line(
                "import tests.suite.debugging.probes as p;; break p.Stopper.add_more"
            )
            if how == "detached":
                terminal.resume(None)
        assert call.result(PATIENCE_S) == [111, 112]
        call = role.step.submit(2)
        with Terminal() as terminal:
            terminal.resume("c")
        assert call.result(PATIENCE_S) == [112, 113]
        with pytest.raises(ConfigError, match="no rank of a run of process"):
            attach(os.getpid(), None)

    def test_terminals_come_and_go(self, stoppers: ColocatedGroup) -> None:
        """Each stop gets its own terminal, however soon it follows the previous stop."""
        call = stoppers.role("stopper", Stopper).stop_often.submit(20)
        for number in range(20):
            with Terminal() as terminal:
                assert terminal.type_line("p number").startswith(f"{number}\n")
        assert call.result(PATIENCE_S) == [0, 1]

    def test_several_are_stopped(self, stoppers: ColocatedGroup) -> None:
        """All stopped ranks are listed, and a terminal follows the rank that it names from stop to stop."""
        role = stoppers.role("stopper", Stopper)
        with Gate() as gate:
            call = role.all_together.submit(gate.address)
            with Terminal("0") as first, Terminal(f"{stoppers.name}/stopper/1") as second:
                listed = attach(os.getpid(), None)
                assert listed.stopped_ranks is not None
                assert [
                    (stop["rank"], stop["terminal"]) for stop in sorted(listed.stopped_ranks, key=lambda s: s["rank"])
                ] == [
                    (0, "colocate debug"),
                    (1, "colocate debug"),
                ]
                listed.close()
                assert os.getpid() in list_stopped_drivers()
                for terminal, rank in ((second, 1), (first, 0)):
                    assert "stopped" in terminal.type_line("c")
                    assert terminal.type_line("p self.ctx.rank").startswith(f"{rank}\n")
                    terminal.resume("c")
            gate.wait_for(2)
        assert call.result(PATIENCE_S) == [(0, False), (1, False)]

    def test_two_stops_of_a_slot(self, spawn: Spawn) -> None:
        """A terminal has one of a slot's stops at a time; the other comes next, or goes to another terminal."""
        roles = {"stopper": colocate.role(Stopper), "beside": colocate.role(Stopper).on(background=True)}
        group = spawn(roles, slots=1)
        stopper, beside_view = group.role("stopper", Stopper), group.role("beside", Stopper)

        def stop_both() -> tuple[colocate.Call[Any], colocate.Call[Any]]:
            calls = stopper.step.submit(1, ranks=(0,)), beside_view.step.submit(2, ranks=(0,))
            part: Any = group._node.get_part("debugging")
            wait_until(lambda: len(part._stops) == 2, "both are stopped")
            return calls

        first, second = stop_both()
        with Terminal("stopper/0") as terminal:
            terminal.resume("continue")
            assert "beside.step" in terminal.read_until_prompt()
            terminal.resume("continue")
        assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == ([111], [112])
        first, second = stop_both()
        with Terminal("stopper/0") as terminal, Terminal("beside/0") as other:
            other.resume("continue")
            assert second.result(PATIENCE_S) == [112]
            assert not first.done()
            terminal.resume("continue")
        assert first.result(PATIENCE_S) == [111]

    def test_a_terminal_that_was_detached_stays(self, spawn: Spawn) -> None:
        """A terminal process that stays after Ctrl-D doesn't block the stops of a later group."""
        with contextlib.ExitStack() as terminals:
            for _ in range(2):
                group = spawn({"stopper": colocate.role(Stopper)}, slots=1)
                call = group.role("stopper", Stopper).step.submit(1, ranks=(0,))
                stays = terminals.enter_context(Terminal("0"))
                stays.resume(None)
                assert call.result(PATIENCE_S) == [111]
                assert stays.read_until_prompt() == ""
                group.close()

    def test_terminal_exits_on_ctrl_d_while_reading(self, stoppers: ColocatedGroup) -> None:
        """`colocate debug` ends on Ctrl-D although one of its threads waits for the driver."""
        call = stoppers.role("stopper", Stopper).step.submit(1)
        terminal = Terminal()
        reads = threading.Thread(target=terminal.read_all)
        reads.start()
        ends = threading.Thread(target=terminal.close)
        ends.start()
        for thread in (ends, reads):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert call.result(PATIENCE_S) == [111, 112]

    def test_no_stop_in_a_job_that_is_to_end(self, runtime: colocate.Runtime, no_leaks: None) -> None:
        """After `release_debuggers` no rank of this process stops, in old or new groups, until that runtime ends."""
        with (
            colocate.connect(processes=True) as other_runtime,
            other_runtime.reserve(1) as other_pool,
            runtime.reserve(2, cpus=0, groups=2) as pool,
        ):
            groups = [target_pool.spawn({"stopper": colocate.role(Stopper)}) for target_pool in (other_pool, pool)]
            calls = [group.role("stopper", Stopper).step.submit(1, ranks=(0,)) for group in groups]
            wait_until(lambda: all(group._node.stopped_slots() for group in groups), "both are stopped")
            Driver(other_runtime).release_debuggers()
            after = pool.spawn({"stopper": colocate.role(Stopper, stops=True)}).role("stopper", Stopper)
            assert [call.result(PATIENCE_S) for call in calls] == [[111], [111, 112]]
            assert after.step(1, ranks=(0, 1)) == [111, 112]
        with runtime.reserve(1, cpus=0) as pool:  # Stops are possible again once that runtime is closed.
            call = pool.spawn({"stopper": colocate.role(Stopper)}).role("stopper", Stopper).step.submit(1, ranks=(0,))
            with Terminal("0") as terminal:
                terminal.resume("continue")
            assert call.result(PATIENCE_S) == [111]

    def test_shown_frame_is_released(self, stoppers: ColocatedGroup) -> None:
        """A debugger keeps no reference to a shown frame once the rank continues."""
        role = stoppers.role("stopper", Stopper)
        for last in ("continue", None):
            call = role.keep.submit()
            with Terminal() as terminal:
                terminal.type_line("where")
                terminal.type_line("up")
                terminal.type_line("down")
                terminal.resume(last)
            call.result(PATIENCE_S)
            assert role.is_kept() == [False, False]

    @pytest.mark.long
    @needs_feature("looking")
    def test_deadlines_wait(self, stoppers: ColocatedGroup, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
        """A stop suspends the call's timeout and the warnings about slow calls."""
        from colocate.driver import RecentCalls  # Part of the feature "looking".

        monkeypatch.setattr("colocate._api.slow.SLOW_S", 0.05)
        monkeypatch.setattr("colocate._api.slow.SLOW_EVERY_S", 0.05)
        role = stoppers.role("stopper", Stopper)
        limit = 1.0
        call = role.sleep_after.options(timeout=limit).submit(0.0)
        with Terminal() as terminal:
            time.sleep(2 * limit)
            driver = Driver(stoppers.owner.owner)
            status = driver.glance(RecentCalls(driver.slot_of))
            slots = next(entry for entry in status if entry["group"] == stoppers.name)["slots"]
            assert ["stopped" in slot for slot in slots] == [False, True]
            terminal.resume("c")
        assert call.result(PATIENCE_S) == [0, 1]
        assert "has been running" not in caplog.text
        call = role.sleep_after.options(timeout=limit).submit(3600.0)
        with Terminal() as terminal:
            time.sleep(2 * limit)
            terminal.resume("c")
            began = time.monotonic()
        with pytest.raises(CallTimeout):
            call.result(PATIENCE_S)
        assert time.monotonic() - began < limit + stoppers._node.grace

    @pytest.mark.long
    def test_timeout_resumes_after_detach_from_hung_rank(self, stoppers: ColocatedGroup) -> None:
        """A call's timeout resumes as soon as no terminal is attached, even if the rank hangs."""
        role = stoppers.role("stopper", Stopper)
        pid, limit = role.pid()[1], 0.5
        call = role.step.options(timeout=limit).submit(1)
        with Terminal():
            time.sleep(2 * limit)
            assert not call.done()
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(CallTimeout):
                call.result(PATIENCE_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    def test_the_others_wait(self, stoppers: ColocatedGroup) -> None:
        """The peers of a stopped rank wait in their collective, which completes when the rank resumes."""
        pytest.importorskip("torch")
        call = stoppers.role("stopper", Stopper).sum.submit(1.0)
        with Terminal() as terminal:
            assert not call.done()
            terminal.resume("c")
        assert call.result(PATIENCE_S) == [2.0, 2.0]

    def test_a_hold_waits(self, stoppers: ColocatedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another rank's failure is reported at once, and the hold waits for a stopped rank beyond the grace."""
        monkeypatch.setattr(stoppers._node, "grace", 0.3)
        role = stoppers.role("stopper", Stopper)
        call = role.step.submit(1)
        with Terminal() as terminal:
            failing = role.fail.submit((0,))
            with pytest.raises(RoleError, match="LookupError"):
                failing.result(PATIENCE_S)
            time.sleep(1.0)
            terminal.resume("c")
        assert call.result(PATIENCE_S) == [111, 112]
        assert role.step(1, ranks=()) == [111, 112]

    def test_close(self, stoppers: ColocatedGroup) -> None:
        """Closing a group ends its stops: the call continues within the grace, and the terminal is notified."""
        role = stoppers.role("stopper", Stopper)
        call = role.step.submit(1, ranks=(0, 1))
        with Terminal() as terminal:
            began = time.monotonic()
            stoppers.close(grace=PATIENCE_S)
            assert time.monotonic() - began < PATIENCE_S / 2
            assert "closed" in terminal.read_until("closed")
        try:
            assert call.result(PATIENCE_S) == [111, 112]
        except ClosedError:
            pass

    @mark_executor_part
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_worker_dies(self, stoppers: ColocatedGroup, rank: int) -> None:
        """The death of the stopped worker or of another ends the call with WorkerDied, and notifies the terminal."""
        role = stoppers.role("stopper", Stopper)
        pids = role.pid()
        call = role.step.submit(1)
        with Terminal() as terminal:
            os.kill(pids[rank], signal.SIGKILL)
            with pytest.raises(WorkerDied) as caught:
                call.result(PATIENCE_S)
            assert caught.value.rank == rank
            terminal.read_until(stoppers.name)
        wait_until(lambda: not stoppers._node.stopped_slots(), "nothing is stopped")

    @pytest.mark.long
    def test_in_a_constructor(self, runtime: colocate.Runtime, no_leaks: None) -> None:
        """A stop in a constructor suspends the start's timeout."""
        from concurrent.futures import ThreadPoolExecutor

        limit = 5.0 + 2 * self.start_s
        with runtime.reserve(1, cpus=0) as pool, ThreadPoolExecutor(1) as thread:
            started = thread.submit(pool.spawn, {"stopper": colocate.role(Stopper, stops=True)}, timeout=limit)
            with Terminal("0") as terminal:
                assert "(stopper.__init__ rank 0) " in terminal.output
                time.sleep(1.2 * limit)
                terminal.resume("c")
            assert started.result(PATIENCE_S).role("stopper", Stopper).step(1, ranks=()) == [111]

    def test_in_a_fork(self, stoppers: ColocatedGroup) -> None:
        """`breakpoint()` in a process that a role has forked raises an error that says why."""
        nothing, message = stoppers.role("stopper", Stopper).fork()
        assert not nothing
        assert "a process that a role has forked" in message

    def test_another_user(self, stoppers: ColocatedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        """A terminal of another user is refused, and the rank stays stopped."""
        call = stoppers.role("stopper", Stopper).step.submit(1)
        Terminal().close()
        call.result(PATIENCE_S)
        monkeypatch.setattr("colocate.features.debugging.desk.user_of", lambda sock: os.getuid() + 1)
        call = stoppers.role("stopper", Stopper).step.submit(1)

        def is_refused() -> bool:
            try:
                attach(os.getpid(), "1").close()
            except ConfigError as error:
                return "another user's" in str(error)
            return False

        wait_until(is_refused, "it is stopped, and nobody is let in")
        assert not call.done()
        monkeypatch.undo()
        Terminal().close()
        call.result(PATIENCE_S)


@needs(OwnProcess)
class PostMortem(ExecutorCase):
    """`connect(debug=True)`."""

    @pytest.fixture
    def runtime_that_stops(self, no_leaks: None) -> Iterator[colocate.Runtime]:
        """Connect with `debug=True`."""
        with self.connect(debug=True) as runtime:
            yield runtime

    @mark_executor_part
    def test_where_a_role_raises(self, runtime_that_stops: colocate.Runtime) -> None:
        """An error stops the rank before the call fails; `quit` raises the error as usual, also in a constructor."""
        with runtime_that_stops.reserve(2, cpus=0) as pool:
            with pool.spawn({"stopper": colocate.role(Stopper)}) as group:
                role = group.role("stopper", Stopper)
                call = role.fail.submit((1,))
                with Terminal() as terminal:
                    assert "is stopped by LookupError: 1 at" in terminal.output
                    assert terminal.type_line("p cause").startswith("{'in': 1}")
                    assert not call.done()
                    terminal.resume("quit")
                with pytest.raises(RoleError, match="LookupError") as caught:
                    call.result(PATIENCE_S)
                assert isinstance(caught.value.__cause__, LookupError)
                assert role.fail(()) == [0, 1]
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(1) as thread:
                started = thread.submit(pool.spawn, {"stopper": colocate.role(Stopper, fails=(1,))})
                with Terminal() as terminal:
                    assert "(stopper.__init__ rank 1) " in terminal.output
                    terminal.resume(None)
                with pytest.raises(RoleStartError, match="LookupError"):
                    started.result(PATIENCE_S)


class _Editor:
    """An editor's end of a debug adapter connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _SHOWN_WITHIN_S)
        self._read = self._socket.makefile("rb")

    def ask(self, command: str, **arguments: Any) -> None:
        """Send a request."""
        request = json.dumps({"seq": 1, "type": "request", "command": command, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(request), request))

    def next_message(self, kind: str, what: str) -> dict[str, Any]:
        """Return the body of the next message whose `event` or `command` is the given one."""
        while True:
            length = 0
            while (line := self._read.readline().strip()) or not length:
                assert line
                length = int(line.rpartition(b":")[2])
            message = json.loads(self._read.read(length))
            if message.get(kind) == what:
                return dict(message.get("body") or {})

    def close(self) -> None:
        self._read.close()
        self._socket.close()


@contextlib.contextmanager
def attach_editor(port: int) -> Iterator[_Editor]:
    """Attach an editor for a block."""
    editor = _Editor(port)
    try:
        editor.ask("initialize", adapterID="suite")
        editor.next_message("command", "initialize")
        editor.ask("attach", justMyCode=False)
        editor.next_message("event", "initialized")
        editor.ask("configurationDone")
        yield editor
    finally:
        editor.close()


def _read_port(capfd: pytest.CaptureFixture[str]) -> int:
    """Wait until the port for editors is printed, and return the port."""
    printed = ""

    def told() -> bool:
        nonlocal printed
        printed += "".join(capfd.readouterr())
        return "of node" in printed

    wait_until(told, "the port is printed")
    return int(printed.partition(" of node")[0].rpartition(":")[2])


@needs(OwnProcess)
class Editors(ExecutorCase):
    """`PYTHONBREAKPOINT` of the driver."""

    @pytest.mark.long
    def test_an_editor_attaches(
        self, no_leaks: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """An editor attaches at a printed port of `ports=`; timeouts wait, and a disconnect resumes the call."""
        pytest.importorskip("debugpy")
        monkeypatch.setenv("PYTHONBREAKPOINT", "debugpy.breakpoint")
        first = find_free_ports(_PORTS)
        with (
            self.connect(ports=f"{first}-{first + _PORTS - 1}") as runtime,
            runtime.reserve(2, cpus=0) as pool,
            pool.spawn({"stopper": colocate.role(Stopper)}) as group,
        ):
            call = group.role("stopper", Stopper).step.options(timeout=1.0).submit(1)
            port = _read_port(capfd)
            assert first <= port < first + _PORTS
            with attach_editor(port) as editor:
                thread = editor.next_message("event", "stopped")["threadId"]
                editor.ask("stackTrace", threadId=thread)
                frame = editor.next_message("command", "stackTrace")["stackFrames"][0]
                assert frame["name"] == "step"
                editor.ask("evaluate", expression="total * 100", frameId=frame["id"])
                assert editor.next_message("command", "evaluate")["result"] == "200"
                time.sleep(1.5)
                assert not call.done()
            assert call.result(PATIENCE_S) == [111, 112]
            wait_until(lambda: not group._node.stopped_slots(), "nothing is stopped")

    def test_none_is_wanted(self, no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """`PYTHONBREAKPOINT=0` disables all stops."""
        monkeypatch.setenv("PYTHONBREAKPOINT", "0")
        with (
            self.connect() as runtime,
            runtime.reserve(2, cpus=0) as pool,
            pool.spawn({"stopper": colocate.role(Stopper)}) as group,
        ):
            assert group.role("stopper", Stopper).step(1, ranks=(0, 1)) == [111, 112]


AREAS = [Debugging, PostMortem, Editors]

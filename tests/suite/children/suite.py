"""Children of roles: which calls fail when a child dies, and that no process is left behind."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.suite.children.probes import Engines, FileRecorder, Patient, Playing, Served, Starter, User, WeightGiver
from tests.suite.marks import mark_executor_part
from tests.suite.probes.limited import LimitedRole
from tests.suite.probes.plain import return_number
from tests.suite.probes.served import FOREVER, QUITS, SERVER, fail_to_start, says_up, serve, stay_silent

import colocate
from colocate import ColocatedGroup, features
from colocate._system.limits import CHILD_TOLD_WITHIN_S
from colocate.errors import (
    ChildDied,
    ConfigError,
    GroupRestarted,
    MemoryBudgetError,
    RoleError,
    RoleStartError,
    StaleWeightsError,
    WorkerDied,
)
from colocate.executor import OwnProcess
from colocate.testing.executors._base import Spawn, needs, needs_feature
from colocate.testing.executors.drivers import Scripted, Scripts
from colocate.testing.gate import Gate
from colocate.testing.waiting import PATIENCE_S, Processes, find_starter, send_signal, wait_until
from colocate.worker.birth.signals import IGNORED

PYTHON = sys.executable
ROOT = repr(str(Path(__file__).parents[3]))


def get_starter(group: ColocatedGroup) -> Starter:
    return group.role("starter", Starter)


class Children(Scripted):
    """`ctx.start`."""

    @pytest.mark.parametrize("waits", ["wait", "ask"])
    @needs(OwnProcess)
    @mark_executor_part
    def test_waiting_call_fails_when_child_dies(self, spawn: Spawn, waits: str) -> None:
        """A call that waits in Python fails at once when the role's child dies, and the worker stays alive."""
        group = spawn({"starter": colocate.role(Starter)}, slots=1)
        starter = get_starter(group)
        pid, worker = starter.serve(), starter.pid()
        with Gate() as gate:
            call = starter.wait.submit(gate.address) if waits == "wait" else starter.ask.submit("hang")
            if waits == "wait":
                gate.wait_for()
                gate.open()
            os.kill(pid, signal.SIGKILL)
            error = call.exception(PATIENCE_S)
        assert isinstance(error, ChildDied)
        assert isinstance(error, RuntimeError)
        assert (error.name, error.pid, error.signal, error.exitcode) == ("server", pid, "SIGKILL", None)
        assert (error.group, error.role, error.method, error.rank) == (group.name, "starter", waits, 0)
        assert "child 'server' of role 'starter' on rank 0" in str(error)
        assert pickle.loads(pickle.dumps(error)).name == "server"
        with pytest.raises(ChildDied, match="was killed by SIGKILL"):
            starter.pid()  # Calls fail until the child is stopped or started again.
        assert starter.serve("the next") != pid
        assert starter.ask(1) == ("the next", 1)
        assert starter.pid() == worker

    def test_async_call_is_cancelled_when_child_dies(self, spawn: Spawn) -> None:
        """An async call fails when the child dies, also on threads: the event loop cancels the await."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        pid = starter.serve()
        with Gate() as gate:
            call = starter.wait_async.submit(gate.address)
            gate.wait_for()
            os.kill(pid, signal.SIGKILL)
            assert isinstance(call.exception(PATIENCE_S), ChildDied)

    def test_of_a_background_role(self, spawn: Spawn) -> None:
        """A background role's call fails when the child dies, during an await or a read from the child."""
        background = colocate.role(Starter).on(background=True)
        group = spawn({"starter": background, "user": colocate.role(User)}, slots=1)
        starter, user = get_starter(group), group.role("user", User)
        for asks in (False, True):
            pid = starter.serve()
            with Gate() as gate:
                call = starter.ask.submit("hang") if asks else starter.wait_async.submit(gate.address)
                if not asks:
                    gate.wait_for()
                assert user.fine() == 0
                os.kill(pid, signal.SIGKILL)
                assert isinstance(call.exception(PATIENCE_S), ChildDied)

    @mark_executor_part
    def test_the_next_call_fails_of_an_end_between_calls(self, spawn: Spawn) -> None:
        """After a child dies between calls, the role's calls fail with exit code and output until a stop."""
        group = spawn({"starter": colocate.role(Starter), "user": colocate.role(User)}, slots=1)
        starter, user = get_starter(group), group.role("user", User)
        os.kill(starter.command([PYTHON, "-c", QUITS], name="quits", ready="the last words")[0], signal.SIGTERM)
        wait_until(lambda: not starter.seen()[0], "the worker has heard of it")
        with pytest.raises(ChildDied, match=r"child 'quits' .* exited with code 3") as caught:
            starter.pid()
        assert (caught.value.exitcode, caught.value.signal) == (3, None)
        assert "the last words" in str(caught.value)
        assert user.fine() == 0
        starter.stop()
        starter.pid()

    @needs(OwnProcess)
    def test_call_of_other_role_fails_with_child(self, spawn: Spawn) -> None:
        """A call of another role that waits in this role's method fails when the child dies."""
        group = spawn({"starter": colocate.role(Starter), "user": colocate.role(User)}, slots=1)
        starter, user = get_starter(group), group.role("user", User)
        pid = starter.serve()
        with Gate() as gate:
            call = user.wait.submit(gate.address)
            gate.wait_for()
            os.kill(pid, signal.SIGKILL)
            assert isinstance(call.exception(PATIENCE_S), ChildDied)
        with pytest.raises(ChildDied):
            user.fine()

    @needs(OwnProcess)
    def test_call_may_restart_dead_child(self, spawn: Spawn) -> None:
        """The call that receives ChildDied may start the child again and succeed."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        pid = starter.serve()
        with Gate() as gate:
            call = starter.recovers.submit(gate.address)
            gate.wait_for()
            os.kill(pid, signal.SIGKILL)
            assert call.result(PATIENCE_S) == ("again", "now")

    def test_broken_connection_raises_child_died(self, spawn: Spawn) -> None:
        """A broken connection raises ChildDied in the call, which may start the child again, also on threads."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        starter.serve()
        assert starter.asks_again() == ("again", "now")

    @needs_feature("looking")
    def test_uninterruptible_call_fails_at_end(self, spawn: Spawn) -> None:
        """A call whose wait can't be interrupted fails with ChildDied at its end."""
        group = spawn({"starter": colocate.role(Starter)}, slots=1)
        starter, graph = get_starter(group), group.owner.owner.graph
        pid = starter.serve()
        with Gate() as gate:
            call = starter.pass_gate.submit(gate.address)
            gate.wait_for()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: "(was killed by SIGKILL" in graph.render(), "it is gone")
        assert isinstance(call.exception(PATIENCE_S), ChildDied)

    @mark_executor_part
    def test_one_that_hangs_is_ended_alone(self, spawn: Spawn, tmp_path: Path) -> None:
        """A child that fails its health check is killed alone: the waiting call fails with the child's stack."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        worker, ill = starter.pid(), tmp_path / "ill"
        starter.serve(health=str(ill))
        starter.ask(1)
        call = starter.ask.submit("hang")
        ill.touch()
        error = call.exception(PATIENCE_S)
        assert isinstance(error, ChildDied)
        assert (error.signal, "hung: its health" in str(error)) == ("SIGABRT", True)
        assert "in serve" in str(error.log_tail)
        starter.stop()
        assert starter.pid() == worker

    @needs(OwnProcess)
    def test_blocked_worker_does_not_make_child_hung(self, spawn: Spawn, tmp_path: Path) -> None:
        """A child isn't taken for hung if the worker itself was blocked for longer than `hung_after`."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        starter.serve(health=str(tmp_path / "ill"))
        starter.keep_the_gil(1.0)
        assert starter.ask(1) == ("", 1)

    @needs(OwnProcess)
    def test_child_death_may_fail_group(self, spawn: Spawn) -> None:
        """With `fails="group"` a child's death counts as a worker's: the group fails, or restarts."""
        roles = {"starter": colocate.role(Starter, "group")}
        group = spawn(roles, slots=1)
        starter = get_starter(group)
        call = starter.ask.submit("exit")
        error = call.exception(PATIENCE_S)
        assert isinstance(error, WorkerDied)
        assert "child 'server' of role 'starter' on rank 0" in str(error)
        assert "it has had enough" in str(error)
        assert group.state == "failed"
        again = spawn(roles, slots=1, on_failure="restart")
        assert isinstance(get_starter(again).ask.submit("exit").exception(PATIENCE_S), GroupRestarted)
        again.wait_ready(PATIENCE_S)
        assert get_starter(again).ask(1) == ("made", 1)

    def test_processes_started_by_child_end_with_child(self, spawn: Spawn) -> None:
        """Processes that a child has started end with the child, after a kill or a stop."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        for end in ("kill", "stop"):
            pid = starter.serve()
            with Processes([pid, starter.ask("spawn")]) as processes:
                if end == "kill":
                    os.kill(pid, signal.SIGKILL)
                else:
                    assert starter.stop() == "stopped"
                processes.wait_all()

    @mark_executor_part
    def test_child_survives_batch_system_signals(self, spawn: Spawn) -> None:
        """A child survives the signals of a batch system, and ends by SIGTERM on a stop."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        pid = starter.serve()
        assert starter.ask(1) == ("", 1)  # The child has started.
        for sent in IGNORED:  # One at a time: Python's faulthandler has a small stack.
            os.kill(pid, sent)
            assert starter.ask(sent) == ("", sent)
        assert starter.stop() == "stopped"
        assert starter.seen()[1] == -signal.SIGTERM

    @mark_executor_part
    def test_a_port_as_a_socket(self, spawn: Spawn) -> None:
        """A command with {fd} gets a listening socket, and one with {port} the number of a reserved port."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        for words in (["fd", "{fd}"], ["port", "{port}"]):
            url = "http://127.0.0.1:{port}/ready"
            command = [PYTHON, "-c", SERVER, *words]
            pid, port = starter.command(command, name="http", port=0, ready=url)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/pid") as answer:
                assert int(answer.read()) == pid
            starter.stop()

    def test_ready_by_a_line(self, spawn: Spawn) -> None:
        """`ready` matches a part of an output line, or a pattern."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        starter.command([PYTHON, "-c", FOREVER], name="one", ready="last words")
        assert "the last words" in starter.seen()[3]
        starter.command([PYTHON, "-c", FOREVER], name="other", line="^the la.* words$")
        assert starter.seen()[2] == "running"

    def test_child_never_ready_raises_child_died(self, spawn: Spawn) -> None:
        """A child that doesn't get ready raises ChildDied with the reason, and the process ends."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        with pytest.raises(ChildDied, match=r"wasn't ready within 0.5 s \(no line like 'never'\)") as caught:
            starter.command([PYTHON, "-c", FOREVER], name="late", line="never", within=0.5)
        assert not _exists(caught.value.pid)
        with pytest.raises(ChildDied, match="exited with code 2"):
            starter.command([PYTHON, "-c", "raise SystemExit(2)"], name="gone", ready="never")
        with pytest.raises(ChildDied, match=r"exited with code 1") as caught:
            starter.start(fail_to_start, ready=says_up)
        assert "ValueError: no engine here" in str(caught.value)
        with pytest.raises(ChildDied, match=r"wasn't ready within 0.5 s \(ready=.*says_up.* hasn't returned\)"):
            starter.start(stay_silent, ready=says_up, within=0.5)
        starter.pid()  # No dead child is left to fail this call.

    @pytest.mark.parametrize(
        ("what", "options", "words"),
        [
            (
                ["nothing-of-this-name"],
                {},
                "the program 'nothing-of-this-name' isn't found: it is on no folder of PATH",
            ),
            (["/nothing/there"], {}, "isn't an executable file"),
            (["-m", "http.server"], {}, "give python= the interpreter"),
            ("sleep 5", {}, r"a command is a list of words; write \['sleep', '5'\]"),
            ([], {}, "a command is a list of words"),
            (["sleep", "{port}"], {}, "port=0 gives it one"),
            (["sleep", "5"], {"cwd": "/nothing/there"}, "is no folder"),
            (["sleep", "5"], {"env": {"A": 1}}, "env={'A': 1}; names and values of variables are text"),
            (["sleep", "5"], {"fails": "all"}, "it is 'call', 'group' or None"),
            (print, {"port": 0}, "port= is for commands"),
        ],
    )
    def test_a_wrong_one_is_refused(self, spawn: Spawn, what: object, options: dict[str, object], words: str) -> None:
        """Wrong arguments of `ctx.start` are refused with advice."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        with pytest.raises(RoleError, match=words) as caught:
            starter.start(what, **options)
        assert isinstance(caught.value.__cause__, ConfigError)

    def test_invalid_times_and_checks_are_refused(self, spawn: Spawn) -> None:
        """Wrong times and checks are refused, and don't disturb running children."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        wrong: Any
        for name, wrong in {"within": (None, -1, math.nan), "hung_after": (None, 0, -1, math.nan, True)}.items():
            for value in wrong:
                with pytest.raises(RoleError, match=f"{name} must be a number of seconds, .*, not {value}"):
                    starter.start([PYTHON, "-c", FOREVER], **{name: value})
        for name, wrong in {"ready": 5, "health": "127.0.0.1:80"}.items():
            with pytest.raises(RoleError, match=f"{name}={wrong!r}; it is a URL.* or a function of the child"):
                starter.start([PYTHON, "-c", FOREVER], **{name: wrong})
        starter.serve()
        for name in ("stop", "wait"):
            with pytest.raises(RoleError, match="must be a number of seconds"):
                starter.end(name, -1)
        assert starter.end("stop", math.inf) == "stopped"

    def test_one_of_little_patience_holds_up_no_other(self, spawn: Spawn) -> None:
        """A child with a tiny `hung_after` doesn't delay the exits of other children."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        starter.start([PYTHON, "-c", FOREVER], health="http://127.0.0.1:1/", hung_after=1e-9, fails=None)
        assert starter.run([PYTHON, "-c", "raise SystemExit(7)"])[0] == 7

    def test_a_port_that_is_taken(self, spawn: Spawn) -> None:
        """A port that is taken, or no valid number, is refused."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(RoleError, match=f"port {port} of 127.0.0.1 is taken"):
                starter.start([PYTHON, "-c", SERVER, "fd", "{fd}"], port=port)
        with pytest.raises(RoleError, match="port=99999; ports are whole numbers up to 65535"):
            starter.start([PYTHON, "-c", SERVER, "fd", "{fd}"], port=99999)

    @needs_feature("looking")
    def test_a_name_that_runs_is_taken(self, spawn: Spawn) -> None:
        """A role has one running child per name; children without a given name get distinct ones."""
        group = spawn({"starter": colocate.role(Starter)}, slots=1)
        starter = get_starter(group)
        starter.serve()
        with pytest.raises(RoleError, match="has a child of this name that runs: give each a name of its own"):
            starter.serve()
        before = starter.seen()
        assert starter.run([PYTHON, "-c", "pass"])[0] == 0
        for _ in range(2):
            starter.start([PYTHON, "-c", FOREVER])
        shown = group.owner.owner.graph.render()
        name = Path(PYTHON).name
        assert all(f"child {child_name} (running" in shown for child_name in ("server", name, f"{name}-2"))
        assert starter.seen() == before

    def test_role_reads_exit_of_command(self, spawn: Spawn) -> None:
        """With `fails=None` an exit fails no call, and the role reads exit code and output itself."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        assert starter.run([PYTHON, "-c", "print(6 * 7); raise SystemExit(5)"]) == (5, "42")
        code, last = starter.run([PYTHON, "-c", "print('x' * 10**6, end='the end')"])
        assert (code, last[-7:], len(last)) == (0, "the end", 1 << 14)

    def test_a_wait_that_was_too_short(self, spawn: Spawn) -> None:
        """A wait that timed out doesn't excuse the child's later death: the next call fails."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        pid = starter.serve()
        assert "hasn't ended within 0.01 s" in starter.wait_too_short()
        with Processes([pid]) as child:
            send_signal(pid, signal.SIGKILL)
            child.wait_all()
        wait_until(lambda: not starter.seen()[0], "the worker has heard of it")
        with pytest.raises(ChildDied, match="was killed by SIGKILL"):
            starter.pid()

    def test_constructor_without_child_fails_group_start(self, spawn: Spawn) -> None:
        """A constructor whose child can't start fails the group's start."""
        with pytest.raises(RoleStartError, match="'nothing' isn't found"):
            spawn({"starter": colocate.role(StartsNothing)}, slots=1)

    @needs_feature("memory")
    @needs_feature("looking")
    def test_memory_and_tree(self, spawn: Spawn) -> None:
        """A child is a node of the ownership graph and a row of the memory report."""
        group = spawn({"starter": colocate.role(Starter)}, slots=1)
        starter = get_starter(group)
        pid = starter.serve()
        size = 64 << 20
        assert starter.ask(("take", size)) == size
        (row,) = [row for row in group.memory().rows() if row["role"] == "starter/server"]
        assert size < row["total"] < 4 * size
        graph = group.owner.owner.graph
        own_graph = features.import_module_of("looking.graph").Graph(
            group._node
        )  # Other Graph objects may not have measured the child yet.
        nodes = [own_graph.data(memory=True)]
        for node in nodes:  # The list grows in the loop.
            nodes += node["children"]
        (data,) = [node for node in nodes if node["kind"] == "child"]
        assert (data["name"], data["state"], data["pid"]) == ("server", "running", pid)
        assert size < data["bytes"] < 4 * size
        assert f"child server (running, pid {pid}" in graph.render()
        starter.stop()
        assert "child server" not in graph.render()
        assert not [row for row in group.memory().rows() if row["role"] == "starter/server"]

    @needs_feature("memory")
    def test_child_excludes_memory_of_other_roles(self, spawn: Spawn) -> None:
        """A role with a child isn't charged with other roles' memory."""
        pytest.importorskip("torch")
        group = spawn({"engines": colocate.role(Engines), "given": colocate.role(WeightGiver)}, slots=1)
        (slot,) = group.memory().slots
        engines, given_bytes = ({role.role: role.total for role in slot.roles}[name] for name in ("engines", "given"))
        assert engines == 0 < given_bytes

    @needs_feature("memory")
    def test_child_memory_counts_towards_budget(self, spawn: Spawn) -> None:
        """A child's memory counts towards its role's host budget."""
        roles = {"starter": colocate.role(Starter).on(host_memory="256MiB")}
        starter = get_starter(spawn(roles, slots=1))
        starter.serve()
        with pytest.raises(MemoryBudgetError, match=r"starter .*children"):
            starter.ask(("take", 512 << 20))
        starter.stop()
        starter.pid()

    @needs_feature("rows")
    def test_a_child_that_dies_amid_rows(self, spawn: Spawn) -> None:
        """A child that dies amid rows fails its rank's running and later rows; other ranks continue, or retry rows."""
        group = spawn({"served": colocate.role(Served)}, slots=2)
        served = group.role("served", Served)
        values = served.play.options(retry=1)(["dies", *["a"] * 20])
        assert values[0] == 1
        assert set(values) <= {0, 1}
        served.begin()
        some = served.play.options(on_error="return")(["dies", "a"])
        assert isinstance(some[0], ChildDied)
        assert (some[0].row, some[1]) == (0, 1)
        served.begin()
        rows = ["dies", *["a" * (number % 5) for number in range(200)]]
        some = served.play.options(on_error="return", sticky=len)(rows)
        assert sum(isinstance(value, ChildDied) for value in some) <= 2  # At most that rank's concurrency.
        served.begin()
        with pytest.raises(ChildDied, match="server") as caught:
            served.play(["dies", "a"])
        assert caught.value.row == 0
        with pytest.raises(ChildDied):
            served.play(["a"])
        served.begin()
        assert served.play(["a"]) == [0]

    @needs_feature("rows")
    @pytest.mark.parametrize("what", ["timeout", "file", "connection"])
    def test_failures_of_rows_that_no_child_has_to_do_with(self, spawn: Spawn, what: str) -> None:
        """A row or call that fails for reasons without a child doesn't block others on the event loop."""
        patient = spawn({"patient": colocate.role(Patient)}, slots=1).role("patient", Patient)
        stood, error = patient.play.options(on_error="return")(["watch", what])
        assert isinstance(stood, float)
        assert stood < CHILD_TOLD_WITHIN_S / 2
        assert isinstance(error, RoleError)
        assert isinstance(error.__cause__, OSError)
        watches, fails = patient.act.submit("watch"), patient.act.submit(what)
        assert isinstance(fails.exception(PATIENCE_S), RoleError)
        assert watches.result(PATIENCE_S) < CHILD_TOLD_WITHIN_S / 2
        with pytest.raises(ChildDied):  # Though the broken connection is noticed first.
            patient.play(["dies"])

    @needs_feature("rows")
    def test_children_of_rows(self, spawn: Spawn) -> None:
        """A row's own child ends with the row and fails this row alone; children of abandoned rows end, too."""
        group = spawn({"playing": colocate.role(Playing)}, slots=1)
        playing = group.role("playing", Playing)
        values = playing.play.options(on_error="return")(["a", "dies", "b", "asks the dead", "c"])
        assert [value for value in values if isinstance(value, tuple)] == [("", "a"), ("", "b"), ("", "c")]
        assert [type(value) for value in values if not isinstance(value, tuple)] == [ChildDied, ChildDied]
        assert len(pids := playing.seen()) == 5
        assert not any(map(_exists, pids))
        with Gate() as gate:
            with playing.play.stream(["a", "b"], gate.address):
                gate.wait_for(2)
            assert not any(map(_exists, playing.seen()))

    @needs_feature("weights")
    def test_weights_reach_child(self, spawn: Spawn) -> None:
        """Weights reach a child through its connection, and a child that dies amid a sync fails the sync."""
        pytest.importorskip("torch")
        group = spawn({"given": colocate.role(WeightGiver), "engines": colocate.role(Engines)}, slots=1)
        given_view, engines = group.role("given", WeightGiver), group.role("engines", Engines)
        for _ in range(2):
            given_view.double()
            assert colocate.sync_weights(given_view, engines).nbytes
            assert engines.sums() == given_view.sums()
        engines.die_next()
        with pytest.raises(ChildDied, match=r"child 'run_engine' .* exited with code 1"):
            colocate.sync_weights(given_view, engines)
        with pytest.raises((ChildDied, StaleWeightsError)):
            engines.sums()
        with pytest.raises(ChildDied):
            colocate.sync_weights(given_view, engines)
        engines.begin()
        colocate.sync_weights(given_view, engines)
        assert engines.sums() == given_view.sums()
        given_view.fail_next()
        with pytest.raises(RoleError, match="no more of them"):
            colocate.sync_weights(given_view, engines)
        colocate.sync_weights(given_view, engines)  # The child has noticed the failure.
        assert engines.sums() == given_view.sums()
        engines.take_one_next()
        with pytest.raises(RoleError, match="returned before it had taken all weights"):
            colocate.sync_weights(given_view, engines)
        colocate.sync_weights(given_view, engines)
        assert engines.sums() == given_view.sums()

    def test_a_function_in_another_environment(self, spawn: Spawn, tmp_path: Path) -> None:
        """With `python=` a function runs under another interpreter, which must have the worker's colocate version."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        assert starter.serve(python=PYTHON)
        assert starter.ask(1) == ("", 1)
        other = tmp_path / "python"
        main = "from colocate.features.children.process import main; main()"
        runs = f"from colocate import _version; _version.__version__ = '0.0.1'; {main}"
        other.write_text(f'#!/bin/sh\nshift 3\nexec {PYTHON} -c "{runs}" "$@"\n')
        other.chmod(0o755)
        starter.stop()
        with pytest.raises(ChildDied, match=r"has colocate 0\.0\.1, and the worker .*: install the same one there"):
            starter.start(serve, python=str(other), ready=says_up)

    @mark_executor_part
    @needs_feature("functions")
    def test_close_ends_children_in_reverse_order(self, spawn: Spawn, tmp_path: Path) -> None:
        """A close ends children in reverse order after their role's `close()`, also after functions have run."""
        file = tmp_path / "ends"
        group = spawn({"recorded": colocate.role(FileRecorder, str(file))}, slots=1)
        group.run(return_number)
        group.close()
        assert file.read_text() == "close ba"

    @needs(OwnProcess)
    @mark_executor_part
    def test_children_end_when_worker_is_killed(self, spawn: Spawn) -> None:
        """Children and their own processes end when their worker is killed."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        with Processes([starter.serve(), starter.ask("spawn")]) as children:
            os.kill(starter.pid(), signal.SIGKILL)
            children.wait_all()

    @pytest.mark.long
    @mark_executor_part
    def test_children_end_when_driver_is_killed(self, scripts: Scripts) -> None:
        """Children and their own processes end when the driver is killed."""
        driver = scripts.start_script(
            """
            sys.path.append(ROOT)
            from tests.suite.children.probes import Starter
            runtime = CONNECT
            starter = runtime.reserve(1, cpus=0).spawn({"starter": colocate.role(Starter)}).role("starter")
            say([starter.serve(), starter.ask("spawn")])
            threading.Event().wait()
            """.replace("ROOT", ROOT)
        )
        with Processes(driver.read_answer()) as children:
            driver.process.kill()
            children.wait_all()

    @mark_executor_part
    def test_child_runs_functions_of_script(self, scripts: Scripts) -> None:
        """A child can run a function of the script, and import modules beside the script."""
        (scripts.folder / "helper.py").write_text(
            "def answer():\n    return 42\n\nif __name__ == '__main__':\n    print(answer())\n"
        )
        driver = scripts.start_script("""
            import helper

            class Asks(colocate.Role):
                @colocate.method
                def ask(self):
                    child = self.ctx.start(told, name="told")
                    command = self.ctx.start(["-m", "helper"], python=sys.executable, fails=None)
                    return child.connection.recv(), command.wait(), command.output

            def told(connection):
                connection.send(helper.answer())
                connection.recv()

            with CONNECT as runtime:
                say(runtime.reserve(1, cpus=0).spawn({"asks": colocate.role(Asks)}).role("asks").ask())
            """)
        assert driver.read_answer() == [[42, 0, "42"]]
        assert driver.wait_exit()[0] == 0

    @needs_feature("looking")
    def test_audit_reports_no_child_as_leaked(self, spawn: Spawn) -> None:
        """An audit reports no child as leaked."""
        group = spawn({"starter": colocate.role(Starter)}, slots=1)
        get_starter(group).serve()
        get_starter(group).ask("spawn")
        assert not group.owner.owner.audit()

    @pytest.mark.long
    def test_one_that_doesnt_end_by_itself_is_killed(self, spawn: Spawn) -> None:
        """A child that doesn't handle SIGTERM is killed by `stop()`."""
        starter = get_starter(spawn({"starter": colocate.role(Starter)}, slots=1))
        pid = starter.serve()
        send_signal(pid, signal.SIGSTOP)
        began = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            assert starter.stop() == "stopped"
        assert not _exists(pid), time.monotonic() - began

    @needs(OwnProcess)
    @mark_executor_part
    def test_processes_survive_batch_system_signals(self, spawn: Spawn) -> None:
        """No colocate process, nor a role's fork, ends on a batch system's signals, and a role's handler runs."""
        sent = [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
        group = spawn({"limited": colocate.role(LimitedRole), "starter": colocate.role(Starter)}, slots=1)
        limited, starter = group.role("limited", LimitedRole), group.role("starter", Starter)
        starter.serve()
        assert starter.ask(1) == ("", 1)  # The child has started.
        worker = starter.pid()
        below = psutil.Process(find_starter(worker)).children(recursive=True)
        pids = [process.pid for process in below if any("colocate" in word for word in process.cmdline()[:5])]
        assert worker in pids
        for pid, process in itertools.product(pids, sent):
            send_signal(pid, process)
        assert starter.ask(2) == ("", 2)
        assert starter.pid() == worker
        assert limited.forked(sent) == 3
        assert limited.hears(signal.SIGUSR1) == [signal.SIGUSR1]
        assert spawn({"starter": colocate.role(Starter)}, slots=1).role("starter", Starter).pid() != worker

    @pytest.mark.long
    @mark_executor_part
    def test_children_and_workers_have_default_signals(self, scripts: Scripts) -> None:
        """Signals that the driver ignores or blocks have their defaults in children and workers."""
        driver = scripts.start_script(
            """
            sys.path.append(ROOT)
            from tests.suite.children.probes import Starter

            for number in signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM})
            with CONNECT as runtime:
                group = runtime.reserve(1, cpus=0).spawn({**ROLES, "starter": colocate.role(Starter)})
                starter = group.role("starter", Starter)
                say(starter.run(["grep", "-E", "SigBlk|SigIgn", "/proc/self/status"]))
                say([starter.run(["sh", "-c", what])[0] for what in ("exit 7", "kill -TERM $$; exit 0")])
                if starter.pid() == os.getpid():
                    say("SIGKILL")
                else:
                    try:
                        group.role("faulty", Faulty).kill()
                    except colocate.WorkerDied as error:
                        say(error.signal)
            """.replace("ROOT", ROOT)
        )
        code, output = driver.read_answer()
        masks = [int(line.split()[1], 16) for line in output.splitlines()]
        # Except the C library's own signals, which its `posix_spawn` ignores, for instance under make.
        nobodys = sum(1 << number - 1 for number in range(1, 65) if number not in signal.valid_signals())
        assert (code, [mask & ~nobodys for mask in masks]) == (0, [0, 0])
        assert driver.read_answer() == [7, -signal.SIGTERM]
        assert driver.read_answer() == "SIGKILL"
        assert driver.wait_exit()[0] == 0


class StartsNothing(Starter):
    """A role whose constructor fails to start a child."""

    def __init__(self) -> None:
        self.ctx.start(["nothing"], name="nothing")


def _exists(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


AREAS = [Children]

"""Tests of attaching to a detached pool, which one driver at a time can borrow or take over."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import attrs
import pytest

import colocate
from colocate import Runtime, wire
from colocate.errors import BorrowedError, ClosedError, ClusterError, ConfigError, WorkerDied
from colocate.executor import Detachable, Watchable, Window
from colocate.testing.executors._base import needs, needs_feature
from colocate.testing.executors.detaching import TTL_S, DetachedCase, counting_view, find_published, reserve_counting
from colocate.testing.executors.drivers import Driver, Scripts
from colocate.testing.gate import Gate
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, Processes, send_signal, wait_until
from colocate_report.window import inspect_cluster_job
from colocate_run.cli.cluster import Cluster
from colocate_run.cli.top import show_top


class Attaching(DetachedCase):
    """Only one driver at a time controls a detached pool, and the pool survives the end of a borrower."""

    @needs(Detachable)
    def test_one_driver_at_a_time(self, runtime: Runtime, name: str) -> None:
        """A second driver can't attach until the first driver has left, and the error names the first driver."""
        pool, _ = reserve_counting(runtime)
        pool.detach(name, ttl=TTL_S)
        with runtime.attach(name) as first:
            with pytest.raises(BorrowedError, match=rf"driver {os.getpid()} on .*since .*own=True") as caught:
                runtime.attach(name)
            assert str(os.getpid()) in caught.value.borrowers[0]
            status = find_published(runtime, name)
            assert status is not None
            assert (status["left_s"], status["epoch"], status["slots"]) == (None, 2, 2)
            assert f"driver {os.getpid()}" in status["driver"]
            assert counting_view(first).add() == [1, 1]
            with pytest.raises(ConfigError, match="is borrowed"):
                first.detach(name, ttl=TTL_S)
        with runtime.attach(name) as second:
            assert counting_view(second).add() == [2, 2]
            assert second._node.epoch == 3
        status = find_published(runtime, name)
        assert status is not None
        assert status["driver"] is None
        assert 0 < status["left_s"] <= TTL_S

    @needs(Detachable)
    def test_owner_changes_groups(self, runtime: Runtime, name: str) -> None:
        """The next driver finds the groups as the former owner left them, even if the owner didn't detach the pool."""
        pool, _ = reserve_counting(runtime)
        pool.detach(name, ttl=TTL_S)
        owner = runtime.attach(name, own=True)
        owner.groups["counting"].close()
        owner.spawn({"echo": colocate.role(Echo)}, name="echo")
        with runtime.attach(name, own=True) as heir:
            assert {key: list(group.roles) for key, group in heir.groups.items()} == {"echo": ["echo"]}
            heir.groups["echo"].role("echo", Echo).noop()
        assert find_published(runtime, name) is None

    @needs(Detachable)
    def test_borrower_killed(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """If a borrower is killed during a call, only the borrow ends, and the running call is cancelled."""
        pool, view = reserve_counting(runtime)
        pids = view.pid()
        pool.detach(name, ttl=TTL_S)
        with Gate() as gate:
            driver = self.start_driver(
                scripts,
                f"""
                pool, view = attached(NAME)
                call = view.until_cancelled.submit({gate.address!r})
                queued = [view.add.submit(100) for _ in range(10)]
                kept = view.made.keep()
                say("there")
                threading.Event().wait()
                """,
                name,
            )
            assert driver.read_answer() == "there"
            gate.wait_for(2)
        driver.process.kill()
        driver.process.wait()
        with runtime.attach(name) as again:
            assert (counting_view(again).add(), counting_view(again).pid()) == ([2, 2], pids)
            assert counting_view(again).still_kept() == [False, False]

    @needs(Detachable)
    def test_taken_from_a_live_driver(self, runtime: Runtime, name: str) -> None:
        """If another driver takes the pool, pending and later calls of the former driver fail with `ClosedError`."""
        pool, _ = reserve_counting(runtime)
        pool.detach(name, ttl=TTL_S)
        borrowed = runtime.attach(name)
        view = counting_view(borrowed)
        resident = view.made.keep()
        resident.fetch()
        with Gate() as gate, self.connect() as other:
            call = view.wait_and_add.submit(gate.address)
            queued = view.add.submit(100)
            gate.wait_for(2)
            mine = other.attach(name, own=True)
            submitted = counting_view(mine).add.submit()
            for pending in (call, queued):
                assert isinstance(pending.exception(PATIENCE_S), ClosedError)
            for use in (view.add, resident.fetch, lambda: borrowed.spawn({"echo": colocate.role(Echo)})):
                with pytest.raises(ClosedError, match=rf"driver {os.getpid()} on .*\(epoch 3\), who has taken it"):
                    use()
            borrowed.close()
            gate.open()
            assert submitted.result(PATIENCE_S) == [2, 2]
            workers = Processes(counting_view(mine).pid())
            mine.close()
            workers.wait_all()
            workers.release_all()
        assert find_published(runtime, name) is None

    @needs(Detachable)
    def test_taken_amid_a_call(self, runtime: Runtime, name: str, caplog: pytest.LogCaptureFixture) -> None:
        """A driver that takes the pool gets warnings about calls that only some ranks have finished."""
        pool, _ = reserve_counting(runtime)
        pool.detach(name, ttl=TTL_S)
        view = counting_view(runtime.attach(name))
        view.add(0)  # A driver's first call wakes the role on all ranks together.
        with Gate() as gate, Gate() as first, self.connect() as other:
            waits = view.wait_and_add.submit(gate.address, ranks=(1,))
            some = view.add.submit(100)
            nobody = view.wait_and_add.submit(first.address, ranks=(0,))
            for waiting_gate in (gate, first):
                waiting_gate.wait_for()
            mine = other.attach(name, own=True)
            view = counting_view(mine)
            first.open()
            gate.open()
            assert view.add(0) == [102, 1]
            for call in (waits, some, nobody):
                assert isinstance(call.exception(PATIENCE_S), ClosedError)
            messages = [record.getMessage() for record in caplog.records if "left by its driver" in record.getMessage()]
            assert [text.partition(": ")[2].partition(",")[0] for text in messages] == ["rank 1 had not"] * 2
            assert ["counting.add" in text for text in messages] == [True, False]
            caplog.clear()
            mine.detach(name, ttl=TTL_S)
            with runtime.attach(name, own=True) as again:
                assert counting_view(again).add(0) == [102, 1]
            assert "left by its driver" not in caplog.text

    @needs(Detachable)
    def test_taken_from_a_stopped_driver(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """A driver that was stopped during a takeover gets a `ClosedError` afterwards, and changes nothing."""
        pool, _ = reserve_counting(runtime)
        pool.detach(name, ttl=TTL_S)
        driver = self.start_driver(
            scripts,
            """
            pool, view = attached(NAME)
            say(view.add())
            wait()
            for attempt in range(2):
                try:
                    say(view.add(100))
                except ClosedError as error:
                    say(str(error))
            """,
            name,
        )
        assert driver.read_answer() == [1, 1]
        send_signal(driver.process.pid, signal.SIGSTOP)
        try:
            with runtime.attach(name, own=True) as mine:
                assert counting_view(mine).add() == [2, 2]
                assert driver.process.stdin is not None
                driver.process.stdin.write("\n")
                driver.process.stdin.flush()
                driver.process.send_signal(signal.SIGCONT)
                for _ in range(2):
                    assert f"driver {os.getpid()} on" in driver.read_answer()
                assert counting_view(mine).add() == [3, 3]
        finally:
            driver.process.send_signal(signal.SIGCONT)
        assert driver.wait_exit()[0] == 0

    @needs(Detachable)
    def test_worker_dies_alone(self, runtime: Runtime, name: str) -> None:
        """If a worker dies while no driver is attached, the next driver gets `WorkerDied`."""
        pool, view = reserve_counting(runtime)
        pids = view.pid()
        pool.detach(name, ttl=TTL_S)
        workers = Processes(pids[:1])
        os.kill(pids[0], signal.SIGKILL)
        workers.wait_all()
        workers.release_all()
        with runtime.attach(name, own=True) as mine:
            assert mine.groups["counting"].state == "failed"
            with pytest.raises(WorkerDied) as caught:
                counting_view(mine).add()
            assert (caught.value.signal, caught.value.rank) == ("SIGKILL", 0)
        assert find_published(runtime, name) is None

    @needs(Detachable)
    def test_owner_killed_after_taking(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """If a driver that has attached with `own=True` is killed, the pool ends, too."""
        pool, view = reserve_counting(runtime)
        workers = Processes(view.pid())
        pool.detach(name, ttl=TTL_S)
        driver = self.start_driver(
            scripts,
            """
            pool, view = attached(NAME, own=True)
            say(view.add())
            threading.Event().wait()
            """,
            name,
        )
        assert driver.read_answer() == [1, 1]
        driver.process.kill()
        workers.wait_all()
        workers.release_all()
        wait_until(lambda: find_published(runtime, name) is None, "it is over")


_WORKER = """
import beside
from colocate import Role, method

LIMIT = 1

class Item:
    def __init__(self, size):
        self.size = size

    def over(self):
        return self.size > LIMIT

class Worker(Role):
    def __init__(self):
        self.kept = Item(7)

    @method
    def make(self, size):
        return Item(size)

    @method
    def look(self, item):
        return type(item) is Item is type(self.kept), item.over(), beside.WHO

    @method
    def limit(self):
        return LIMIT

    @method
    def beside(self, value):
        return type(value) is beside.Value

    @method
    def put(self, value):
        self.kept = value

    @method
    def late(self):
        import later
        return later.Value()

    @method
    def is_late(self, value):
        import later
        return type(value) is later.Value
"""

_DETACHES = """
pool = runtime.reserve(1, cpus=0, detachable=True)
pool.spawn({"worker": colocate.role(Worker)}, name="working")
pool.detach(NAME, ttl=300)
say("detached")
"""

_ATTACHES = """
def tell(function):
    try:
        return function()
    except colocate.ColocateError as error:
        return str(error)

def use():
    with runtime.attach(NAME) as pool:
        worker = pool.groups["working"][Worker]
        (made,) = worker.make(3)
        return made.over(), worker.look(made), worker.limit(), worker.beside(beside.Value())
"""


_CLOSES = """
runtime.attach(NAME, own=True).close()
say("closed")
"""


class Successors(DetachedCase):
    """The next driver can use the former driver's definitions on the workers, but can't send new ones."""

    def _start_successor(self, scripts: Scripts, name: str, text: str, who: str = "first") -> Driver:
        (scripts.folder / "beside.py").write_text(f"WHO = {who!r}\nclass Value: pass\n")
        return self.start_driver(scripts, text, name)

    def _hear_successor(self, scripts: Scripts, name: str, text: str, who: str = "first") -> Any:
        driver = self._start_successor(scripts, name, text, who)
        answer = driver.read_answer()
        assert driver.wait_exit() == (0, "")
        return answer

    @needs(Detachable)
    @needs_feature("functions")
    def test_another_script(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """Another driver script can call roles and pass on results, but can't send its own classes and functions."""
        self._hear_successor(scripts, name, _WORKER + _DETACHES)
        used = (_WORKER + _ATTACHES).replace("LIMIT = 1", "LIMIT = 9")
        assert self._hear_successor(scripts, name, used + "say(tell(use))") == [
            True,
            [[True, True, "first"]],
            [1],
            [True],
        ]
        sends = """
        with runtime.attach(NAME) as pool:
            group = pool.groups["working"]
            for each in (
                lambda: group[Worker].put(Item(3)),
                lambda: group.run(lambda ctx: LIMIT),
                lambda: group.run(tell),
                lambda: group.run(lambda ctx: 3),
                lambda: group[Worker].limit(),
            ):
                say(tell(each))
        """
        driver = self._start_successor(scripts, name, used + textwrap.dedent(sends))
        for item in ("Item", "<lambda>, which names the global 'LIMIT',", "tell"):
            assert (
                f"{item} is of this driver's script, and can't go to workers that another driver has"
                in driver.read_answer()
            )
        assert [driver.read_answer(), driver.read_answer()] == [[3], [1]]
        assert driver.wait_exit() == (0, "")
        assert self._hear_successor(scripts, name, _CLOSES) == "closed"


_JOB = """
from colocate.testing.probes.counting import Counting

with CONNECT as runtime:
    roles = {"counting": colocate.role(Counting), "other": colocate.role(Counting).on(slots=[0])}
    group = runtime.reserve(2, cpus=0).spawn(roles, name="policy")
    with colocate.record(runtime, NAME):
        with group.pipeline():
            call = group.role("counting", Counting).wait_and_add.submit(GATE)
            group.role("other", Counting).add.submit()
        say(call.result())
        wait()
"""


class Watching(DetachedCase):
    """Tests of `colocate top` in another process than the job."""

    @pytest.fixture
    def job(self) -> str:
        """A unique name for a job."""
        return f"test-{uuid.uuid4().hex[:8]}"

    @pytest.fixture
    def gate(self) -> Iterator[Gate]:
        """The gate at which the job's first call waits."""
        with Gate() as gate:
            yield gate

    def start_job(self, scripts: Scripts, job: str, gate: Gate) -> Driver:
        """Start a job, and wait until both slots are in a call."""
        driver = scripts.start_script(f"NAME, GATE = {job!r}, {gate.address!r}\n{_JOB}")
        gate.wait_for(2)
        return driver

    @needs(Watchable)
    @needs_feature("looking")
    def test_looked_at_from_elsewhere(
        self, scripts: Scripts, runtime: Runtime, job: str, gate: Gate, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Another driver can see a job's running and waiting calls, and the job continues undisturbed."""
        driver = self.start_job(scripts, job, gate)
        window = find_window(runtime, job)
        assert window is not None
        (group,) = inspect_cluster_job(window, as_watchable(runtime))["groups"]
        assert (group["group"], group["state"], len(group["slots"])) == ("policy", "ready", 2)
        first, second = group["slots"]
        assert [(slot["call"], slot["queue"]) for slot in (first, second)] == [
            ("counting.wait_and_add", 1),
            ("counting.wait_and_add", 0),
        ]
        assert [role["role"] for role in first["roles"]] == ["counting", "other"]
        assert first["age"] > 0
        for way in window.address.split(","):  # One address is for this machine, and one for other machines.
            assert (
                inspect_cluster_job(attrs.evolve(window, address=way), as_watchable(runtime))["pid"]
                == driver.process.pid
            )
        assert first["age"] < inspect_cluster_job(window, as_watchable(runtime))["groups"][0]["slots"][0]["age"]
        with pytest.raises(ClusterError, match="can't be reached from here"):
            inspect_cluster_job(attrs.evolve(window, key=wire.new_key()), as_watchable(runtime))

        config = scripts.folder / "cluster.yaml"
        config.write_text(json.dumps({"executor": {"use": self.executor, "with": dict(self.options)}}))
        cluster = Cluster(config)
        assert show_top(job, cluster, once=True, every=1.0, json=False) == 0
        shown = capsys.readouterr().out
        assert f"{job} (process {driver.process.pid} on " in shown
        assert "counting.wait_and_add" in shown
        assert show_top(f"{job}x", cluster, once=True, every=1.0, json=False) == 1
        message = capsys.readouterr().err
        assert f"no job is called '{job}x'" in message
        assert f"did you mean '{job}'?" in message

        gate.open()
        assert driver.read_answer() == [1, 1]
        assert driver.wait_exit() == (0, "")
        assert find_window(runtime, job) is None
        with pytest.raises(ClusterError, match="can't be reached from here"):
            inspect_cluster_job(window, as_watchable(runtime))
        assert show_top(job, cluster, once=True, every=1.0, json=False) == 1
        assert "no job " in capsys.readouterr().err

    @needs(Detachable)
    @needs_feature("pipelines")
    def test_detached_pool_is_looked_at(
        self, runtime: Runtime, name: str, gate: Gate, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """A detached pool can be inspected with and without a driver, and the inspection changes nothing."""
        executor = cast("Detachable", runtime._node.services.executor)
        config = tmp_path / "cluster.yaml"
        config.write_text(json.dumps({"executor": {"use": self.executor, "with": dict(self.options)}}))
        pool, view = reserve_counting(runtime)
        view.add()
        pool.detach(name, ttl=TTL_S)

        before = executor.inspect_pool(name)
        status = executor.inspect_pool(name)
        assert (status["driver"], status["epoch"], status["silent"], status["lost"]) == (None, before["epoch"], [], 0)
        assert before["left_s"] >= status["left_s"]  # The time to live wasn't renewed.
        workers = sorted(status["workers"], key=lambda each: int(each["slot"]))
        assert [(each["group"], each["slot"], each["call"], each["queue"]) for each in workers] == [
            ("counting", 0, None, 0),
            ("counting", 1, None, 0),
        ]
        for rank, worker in enumerate(workers):
            (role,) = worker["roles"]
            assert (role["role"], role["rank"], role["asleep"]) == ("counting", rank, 0)
            assert role["bytes"] is not None
        assert show_top(name, Cluster(config), once=True, every=1.0, json=False) == 0
        shown = capsys.readouterr().out
        assert f"{name} (detached pool), it lives " in shown
        assert "counting (detached)" in shown

        with runtime.attach(name) as borrowed:
            with borrowed.groups["counting"].pipeline():
                first = counting_view(borrowed).wait_and_add.submit(gate.address)
                counting_view(borrowed).add.submit()
            gate.wait_for(2)
            held = executor.inspect_pool(name)
            assert held["driver"].startswith(f"driver {os.getpid()} on ")
            assert held["left_s"] is None
            assert [(each["call"], each["queue"]) for each in held["workers"]] == [("counting.wait_and_add", 1)] * 2
            assert all(each["age"] > 0 for each in held["workers"])

            def all_busy() -> bool:
                return all(worker["roles"][0]["busy"] > 0 for worker in executor.inspect_pool(name)["workers"])

            wait_until(all_busy, "who runs its first call is busy")
            assert show_top(f"pool/{name}", Cluster(config), once=True, every=1.0, json=True) == 0
            report = json.loads(capsys.readouterr().out)
            assert [group["state"] for group in report["groups"]] == ["attached"]
            gate.open()
            assert first.result() == [2, 2]
            assert counting_view(borrowed).add() == [4, 4]
            after = executor.inspect_pool(name)
            assert after["epoch"] == held["epoch"]
            assert all(worker["roles"][0]["busy"] > 0 for worker in after["workers"])
        with pytest.raises(ConfigError, match=f"no pool '{name}x' is detached"):
            executor.inspect_pool(f"{name}x")

    def test_top_without_cluster_explains_private_jobs(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Without a cluster, `colocate top` says that a private cluster has only the jobs of its driver."""
        assert show_top(None, Cluster(executor=self.executor), once=True, every=1.0, json=False) == 1
        assert "a private one has no jobs besides its driver's" in capsys.readouterr().err


def as_watchable(runtime: Runtime) -> Watchable:
    """Return a runtime's executor, typed as `Watchable`."""
    return cast("Watchable", runtime._node.services.executor)


def find_window(runtime: Runtime, name: str) -> Window | None:
    """Return the window through which a job can be inspected; None if there is no such job."""
    return next((window for window in as_watchable(runtime).windows() if window.name == name), None)

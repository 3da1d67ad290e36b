"""Who has a detached pool: one driver at a time, who borrows it or takes it over."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import colocate
from colocate import RoleSpec, Runtime
from colocate._api import detached
from colocate._crew.crew import Crew
from colocate._signals.at_work import waited_for
from colocate.errors import BorrowedError, ClosedError, ColocateError, ConfigError, WorkerDied
from colocate.executor import Detachable
from colocate.testing.executors._base import needs, of_executor
from colocate.testing.executors._detached import TTL_S, DetachedCase, counting, new, published
from colocate.testing.executors.drivers import Scripts
from colocate.testing.gate import Gate
from colocate.testing.probes.counting import Counting, Stepping
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, Processes, send, wait_until


class Attaching(DetachedCase):
    """A detached pool is commanded by one driver at a time, and a borrower's end is only that of its borrow."""

    @needs(Detachable)
    @of_executor
    def test_one_driver_at_a_time(self, runtime: Runtime, name: str) -> None:
        """Who attaches while somebody else does is told who that is; then it is its turn."""
        pool, _ = new(runtime)
        pool.detach(name, ttl=TTL_S)
        with runtime.attach(name) as first:
            with pytest.raises(BorrowedError, match=rf"driver {os.getpid()} on .*since .*own=True") as caught:
                runtime.attach(name)
            assert str(os.getpid()) in caught.value.borrowers[0]
            found = published(runtime, name)
            assert found is not None
            assert (found["left_s"], found["epoch"], found["slots"]) == (None, 2, 2)
            assert f"driver {os.getpid()}" in found["driver"]
            assert counting(first).add() == [1, 1]
            with pytest.raises(ConfigError, match="is borrowed"):
                first.detach(name, ttl=TTL_S)
        with runtime.attach(name) as second:
            assert counting(second).add() == [2, 2]
            assert second._node.epoch == 3
        found = published(runtime, name)
        assert found is not None
        assert found["driver"] is None
        assert 0 < found["left_s"] <= TTL_S

    @needs(Detachable)
    @of_executor
    def test_borrower_spawns(self, runtime: Runtime, name: str) -> None:
        """What a borrower spawns on free slots ends with its borrow; what it closes of the pool's own lives on."""
        pool = runtime.reserve(2, cpus=0, detachable=True)
        pool[0].spawn({"counting": colocate.role(Counting)}, name="counting")
        pool.detach(name, ttl=TTL_S)
        with runtime.attach(name) as borrowed:
            echo = borrowed[1].spawn({"echo": colocate.role(Echo)}, name="guest")
            workers = Processes([pid for pid, _, _ in echo.role("echo", Echo).place()])
            view = counting(borrowed)
            view.add()
            borrowed.groups["counting"].close()
            with pytest.raises(ClosedError):
                view.add()
        workers.wait()
        workers.close()
        with runtime.attach(name) as again:
            assert list(again.groups) == ["counting"]
            assert counting(again).add() == [2]

    @needs(Detachable)
    @of_executor
    def test_automatic_names_beside_its(self, runtime: Runtime, name: str) -> None:
        """A pool that is attached, and its groups, keep the names that another driver gave; new ones get free ones."""
        roles: dict[str, RoleSpec[Any]] = {"echo": colocate.role(Echo), "rows": colocate.role(Rows)}
        with self.connect() as another:
            pool = another.reserve(1, cpus=0, detachable=True)
            pool.spawn(roles)
            assert (pool.name, *pool.groups) == ("pool-1", "group-1")
            pool.detach(name, ttl=TTL_S)
        with self.connect() as other:
            before = other.reserve(1, cpus=0)
            with other.attach(name) as pool, other.reserve(1, cpus=0) as after:
                assert [each.name for each in (before, pool, after)] == ["pool-1", "pool-1", "pool-2"]
                groups = [pool.groups["group-1"], before.spawn(roles), after.spawn(roles)]
                assert [group.name for group in groups] == ["group-1", "group-2", "group-3"]
                assert other.groups == {group.name: group for group in groups}
                with groups[0].role("rows", Rows).produce.keep(2) as kept:
                    for group in groups:
                        assert group.role("echo", Echo).first.options(timeout=PATIENCE_S)(kept.ref) == [0, 1]
                assert not other.audit()
            assert (before.alive, list(other.groups)) == (True, ["group-2"])
            assert not other.audit()

    @needs(Detachable)
    @of_executor
    def test_a_name_that_is_taken(self, runtime: Runtime, name: str) -> None:
        """A group of the pool can't have the name of one of this runtime: attaching says whose, and changes nothing."""
        pool = runtime.reserve(1, cpus=0, detachable=True)
        theirs = pool.spawn({"counting": colocate.role(Counting)})
        pool.detach(name, ttl=TTL_S)
        with runtime.reserve(1, cpus=0) as own:
            before = runtime.groups.copy()
            mine = own.spawn({"echo": colocate.role(Echo)}, name=theirs.name)
            with pytest.raises(ConfigError, match=f"has a group '{mine.name}', and so has this runtime, made at .*py:"):
                runtime.attach(name)
            assert runtime.groups == {**before, mine.name: mine}
            assert mine.role("echo", Echo).first(1) == 1
        with runtime.attach(name) as attached:
            (group,) = attached.groups.values()
            assert (group.name, group.role("counting", Counting).add()) == (theirs.name, [1])
            with runtime.reserve(1, cpus=0) as own:  # an automatic name is one that is free
                assert own.spawn({"echo": colocate.role(Echo)}).name not in ("", group.name)

    @needs(Detachable)
    @of_executor
    def test_owner_changes_groups(self, runtime: Runtime, name: str) -> None:
        """What who took it has spawned and closed is what the next one finds, though it never detached it again."""
        pool, _ = new(runtime)
        pool.detach(name, ttl=TTL_S)
        owner = runtime.attach(name, own=True)
        owner.groups["counting"].close()
        owner.spawn({"echo": colocate.role(Echo)}, name="echo")
        with runtime.attach(name, own=True) as heir:
            assert {key: list(group.roles) for key, group in heir.groups.items()} == {"echo": ["echo"]}
            heir.groups["echo"].role("echo", Echo).noop()
        assert published(runtime, name) is None

    @needs(Detachable)
    @of_executor
    def test_borrower_killed(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """SIGKILL of who borrows it, in the middle of a call, ends only the borrow; the call sees it."""
        pool, view = new(runtime)
        pids = view.pid()
        pool.detach(name, ttl=TTL_S)
        with Gate() as gate:
            driver = self.start(
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
            assert driver.hear() == "there"
            gate.wait_for(2)
        driver.process.kill()
        driver.process.wait()
        with runtime.attach(name) as again:
            assert (counting(again).add(), counting(again).pid()) == ([2, 2], pids)
            assert counting(again).still_kept() == [False, False]

    @needs(Detachable)
    @of_executor
    def test_borrower_killed_amid_an_await(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """What an async method awaits for it is cancelled, so that the next driver doesn't wait for that."""
        pool, _ = new(runtime)
        pool.detach(name, ttl=TTL_S)
        with Gate() as gate:
            with self.killed_amid(scripts, name, f"view.until_given_up.submit({gate.address!r})"):
                gate.wait_for(2)
            with runtime.attach(name) as again:
                assert counting(again).add() == [2, 2]

    @needs(Detachable)
    @of_executor
    def test_borrower_killed_in_a_collective(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """So it does when one rank waits for the other in a collective: the next driver's collectives work."""
        pytest.importorskip("torch")
        pool, view = new(runtime)
        assert view.sum() == [2, 2]
        pool.detach(name, ttl=TTL_S)
        with Gate() as gate, Gate() as come:
            with self.killed_amid(scripts, name, f"view.sum_at.submit([{gate.address!r}, None], {come.address!r})"):
                gate.wait_for()
                come.wait_for()
            borrowed = runtime.attach(name)
            call = counting(borrowed).sum.submit()
        assert call.result(PATIENCE_S) == [2, 2]
        borrowed.close()

    @needs(Detachable)
    @of_executor
    def test_borrower_killed_amid_a_step(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """What all ranks are in ends as it would have: nobody cuts their groups while they need them."""
        pytest.importorskip("torch")
        pool, _ = new(runtime)
        pool.detach(name, ttl=TTL_S)
        with Gate() as gate:
            with self.killed_amid(scripts, name, f"view.sum_on.submit({gate.address!r})"):
                gate.wait_for(2)
                gate.open()
            with runtime.attach(name) as again:
                assert counting(again).add(0) == [1, 1]
                assert counting(again).sum() == [2, 2]

    @needs(Detachable)
    @of_executor
    def test_borrower_killed_before_a_step_of_some(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """Who is in the backward pass of a step that the other rank drops is freed, and nothing that it has is lost."""
        pytest.importorskip("torch")
        pool = runtime.reserve(2, cpus=0, detachable=True)
        pool.spawn({"counting": colocate.role(Stepping)}, name="counting").role("counting", Stepping).step()
        pool.detach(name, ttl=TTL_S)
        with Gate() as gate, Gate() as come:
            keeps_one = f"view.until_cancelled.options(ranks=(0,)).submit({gate.address!r})"
            with self.killed_amid(scripts, name, f"(view.step(), {keeps_one}, view.step.submit({come.address!r}))"):
                gate.wait_for()
                gate.open()
                come.wait_for()
            with runtime.attach(name) as again:
                stepping = again.groups["counting"].role("counting", Stepping)
                assert stepping.add(0) == [3, 2]
                assert stepping.step() == [4, 3]

    @needs(Detachable)
    @of_executor
    def test_call_that_stays(
        self, scripts: Scripts, runtime: Runtime, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A call of the driver before that doesn't come back within the grace fails the group, as any hang does."""
        pool, _ = new(runtime)
        pool.detach(name, ttl=TTL_S)
        with Gate() as gate:
            with self.killed_amid(scripts, name, f"view.wait_and_add.submit({gate.address!r})"):
                gate.wait_for(2)
            monkeypatch.setattr(Crew, "grace", 0.5)
            mine = runtime.attach(name, own=True)
            error = counting(mine).add.submit().exception(PATIENCE_S)
            mine.close()
        assert "did not come back within 0.5 s" in str(error)
        assert "pass_gate" in str(error)

    @needs(Detachable)
    @of_executor
    def test_taken_from_a_live_driver(self, runtime: Runtime, name: str) -> None:
        """Who has it is fenced: what it has under way, what it keeps and what it tries later end with who took it."""
        pool, _ = new(runtime)
        pool.detach(name, ttl=TTL_S)
        borrowed = runtime.attach(name)
        view = counting(borrowed)
        kept = view.made.keep()
        kept.fetch()
        with Gate() as gate, self.connect() as other:
            call = view.wait_and_add.submit(gate.address)
            queued = view.add.submit(100)
            gate.wait_for(2)
            mine = other.attach(name, own=True)
            taken = counting(mine).add.submit()
            for each in (call, queued):
                assert isinstance(each.exception(PATIENCE_S), ClosedError)
            for use in (view.add, kept.fetch, lambda: borrowed.spawn({"echo": colocate.role(Echo)})):
                with pytest.raises(ClosedError, match=rf"driver {os.getpid()} on .*\(epoch 3\), who has taken it"):
                    use()
            borrowed.close()
            gate.open()
            assert taken.result(PATIENCE_S) == [2, 2]
            workers = Processes(counting(mine).pid())
            mine.close()
            workers.wait()
            workers.close()
        assert published(runtime, name) is None

    @needs(Detachable)
    @of_executor
    def test_taken_while_it_is_closed(self, runtime: Runtime, name: str) -> None:
        """An owner that loses it while it closes it lets go: what it hasn't ended yet goes on, and so do all slots."""
        pool = runtime.reserve(2, cpus=0, detachable=True)
        for slot, group in enumerate(("counting", "busy")):
            pool[slot].spawn({"counting": colocate.role(Counting)}, name=group)
        pool.detach(name, ttl=TTL_S)
        owner = runtime.attach(name, own=True)
        with Gate() as gate, self.connect() as other, ThreadPoolExecutor(1) as threads:
            owner.groups["busy"].role("counting", Counting).wait_and_add.submit(gate.address)
            gate.wait_for()
            closing = threads.submit(owner.close, PATIENCE_S)
            wait_until(lambda: not owner.groups["busy"].alive, "the newest group is being closed")
            mine = other.attach(name, own=True)
            closing.result(PATIENCE_S)
            gate.open()
            with pytest.raises(WorkerDied):  # it was told to end
                mine.groups["busy"].role("counting", Counting).add()
            mine.groups["busy"].close()
            mine[1].spawn({"echo": colocate.role(Echo)}).role("echo", Echo).noop()
            assert counting(mine).add() == [1]
            mine.close()
        assert published(runtime, name) is None

    @needs(Detachable)
    @pytest.mark.parametrize("stage", ["_taken", "_greet"])
    @of_executor
    def test_taken_while_it_is_attached(
        self, runtime: Runtime, name: str, stage: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who is fenced before it has taken up the groups keeps none of them, and can attach the pool again."""
        pool, view = new(runtime)
        view.add()
        pool.detach(name, ttl=TTL_S)
        go_on, mine = getattr(detached, stage), []
        with self.connect() as other:

            def taken_first(node: Any, *args: Any) -> Any:
                monkeypatch.undo()
                with waited_for():  # as another process would do
                    mine.append(other.attach(name, own=True))
                wait_until(lambda: node.closed_by or node.owner.closed_by, "it is told")
                return go_on(node, *args)

            monkeypatch.setattr(detached, stage, taken_first)
            with pytest.raises(ClosedError, match="who has taken it"):
                counting(runtime.attach(name, own=True)).add()
            mine[0].detach(name, ttl=TTL_S)
            with runtime.attach(name, own=True) as again:
                assert counting(again).add() == [2, 2]
        assert published(runtime, name) is None

    @needs(Detachable)
    @of_executor
    def test_taken_from_itself(self, runtime: Runtime, name: str) -> None:
        """A driver may take what it has borrowed; it is told of the end of a worker as ever."""
        pool, view = new(runtime)
        pids = view.pid()
        pool.detach(name, ttl=TTL_S)
        before = runtime.attach(name).groups["counting"]._node.workforce.workers
        with runtime.attach(name, own=True) as mine:
            wait_until(lambda: all(worker.exit for worker in before), "the borrow is over")
            assert counting(mine).add() == [1, 1]
            os.kill(pids[1], signal.SIGKILL)
            wait_until(lambda: mine.groups["counting"]._node.failure, "it is told")
            with pytest.raises(WorkerDied) as caught:
                counting(mine).add()
            assert (caught.value.signal, caught.value.rank) == ("SIGKILL", 1)
        assert published(runtime, name) is None

    @needs(Detachable)
    @of_executor
    def test_taken_in_vain(self, runtime: Runtime, name: str) -> None:
        """One that was to be an owner and failed takes nothing along: the pool goes on with all its slots."""
        pool, view = new(runtime)
        pids = view.pid()
        pool.detach(name, ttl=TTL_S)
        with self.connect() as other:
            _, namesake = new(other, 1)
            with pytest.raises(ConfigError, match="counting"):
                other.attach(name, own=True)
            namesake.add()
        found = published(runtime, name)
        assert found is not None
        assert found["driver"] is None
        with runtime.attach(name) as borrowed:
            assert (counting(borrowed).add(), counting(borrowed).pid()) == ([1, 1], pids)

    @needs(Detachable)
    @of_executor
    def test_taken_from_a_stopped_driver(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """One that was stopped through it all wakes to a ClosedError, and has changed nothing."""
        pool, _ = new(runtime)
        pool.detach(name, ttl=TTL_S)
        driver = self.start(
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
        assert driver.hear() == [1, 1]
        send(driver.process.pid, signal.SIGSTOP)
        try:
            with runtime.attach(name, own=True) as mine:
                assert counting(mine).add() == [2, 2]
                assert driver.process.stdin is not None
                driver.process.stdin.write("\n")
                driver.process.stdin.flush()
                driver.process.send_signal(signal.SIGCONT)
                for _ in range(2):
                    assert f"driver {os.getpid()} on" in driver.hear()
                assert counting(mine).add() == [3, 3]
        finally:
            driver.process.send_signal(signal.SIGCONT)
        assert driver.end()[0] == 0

    @needs(Detachable)
    @of_executor
    def test_worker_dies_alone(self, runtime: Runtime, name: str) -> None:
        """A worker that dies while nobody is attached: whoever comes next is told, as if it had been there."""
        pool, view = new(runtime)
        pids = view.pid()
        pool.detach(name, ttl=TTL_S)
        workers = Processes(pids[:1])
        os.kill(pids[0], signal.SIGKILL)
        workers.wait()
        workers.close()
        with runtime.attach(name, own=True) as mine:
            assert mine.groups["counting"].state == "failed"
            with pytest.raises(WorkerDied) as caught:
                counting(mine).add()
            assert (caught.value.signal, caught.value.rank) == ("SIGKILL", 0)
        assert published(runtime, name) is None

    @needs(Detachable)
    @of_executor
    def test_owner_killed_after_taking(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """One that took it with own=True takes it along when it dies."""
        pool, view = new(runtime)
        workers = Processes(view.pid())
        pool.detach(name, ttl=TTL_S)
        driver = self.start(
            scripts,
            """
            pool, view = attached(NAME, own=True)
            say(view.add())
            threading.Event().wait()
            """,
            name,
        )
        assert driver.hear() == [1, 1]
        driver.process.kill()
        workers.wait()
        workers.close()
        wait_until(lambda: published(runtime, name) is None, "it is over")

    @needs(Detachable)
    @of_executor
    def test_restart_by_a_borrower(self, runtime: Runtime, name: str) -> None:
        """A group that is rebuilt while it is borrowed is the one that the next driver finds."""
        pool = runtime.reserve(2, cpus=0, detachable=True)
        pool.spawn({"counting": colocate.role(Counting)}, name="counting", on_failure="restart")
        pool.detach(name, ttl=TTL_S)
        with runtime.attach(name) as borrowed:
            group, view = borrowed.groups["counting"], counting(borrowed)
            view.add()
            os.kill(view.pid()[0], signal.SIGKILL)
            wait_until(lambda: group.generation == 1, "it is being rebuilt")
            group.wait_ready(PATIENCE_S)
            assert view.add() == [1, 1]
            with pytest.raises(ColocateError):
                view.fail()
            assert view.add() == [2, 2]
            pids = view.pid()
        with runtime.attach(name, own=True) as again:
            assert again.groups["counting"].generation == 1
            assert (counting(again).add(), counting(again).pid()) == ([3, 3], pids)

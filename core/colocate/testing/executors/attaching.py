"""Who has a detached pool: one driver at a time, who borrows it or takes it over."""

from __future__ import annotations

import os
import signal

import pytest

import colocate
from colocate import Runtime
from colocate.errors import BorrowedError, ClosedError, ColocateError, ConfigError, WorkerDied
from colocate.executor import Detachable
from colocate.testing.executors._base import needs, of_executor
from colocate.testing.executors._detached import TTL_S, DetachedCase, counting, new, published
from colocate.testing.executors.drivers import Scripts
from colocate.testing.gate import Gate
from colocate.testing.probes.counting import Counting
from colocate.testing.probes.plain import Echo
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

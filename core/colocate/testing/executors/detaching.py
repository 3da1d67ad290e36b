"""Pools that outlive their drivers: detached, borrowed, taken over, expired."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import colocate
from colocate import Pool, Runtime
from colocate.errors import BorrowedError, CapabilityError, ClosedError, ColocateError, ConfigError, WorkerDied
from colocate.executor import Detachable
from colocate.testing.executors._base import needs
from colocate.testing.executors.drivers import Driver, Scripted, Scripts
from colocate.testing.gate import Gate
from colocate.testing.probes.counting import Counting
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, Processes, wait_until

TTL_S = 300.0  # longer than any test

HEADER = """
from colocate.testing.probes.counting import Counting
from colocate.errors import ClosedError

def new(slots=2, **more):
    pool = runtime.reserve(slots, cpus=0, detachable=True, **more)
    return pool, pool.spawn({"counting": colocate.role(Counting)}, name="counting").role("counting", Counting)

def attached(name, **more):
    pool = runtime.attach(name, **more)
    return pool, pool.groups["counting"].role("counting", Counting)
"""


def counting(pool: Pool) -> Counting:
    """The view of the role that the tests detach."""
    return pool.groups["counting"].role("counting", Counting)


def new(runtime: Runtime, slots: int = 2, name: str = "counting") -> tuple[Pool, Counting]:
    """A pool with such a role."""
    pool = runtime.reserve(slots, cpus=0, detachable=True)
    return pool, pool.spawn({"counting": colocate.role(Counting)}, name=name).role("counting", Counting)


def published(runtime: Runtime, name: str) -> dict[str, Any] | None:
    """What the cluster says of a detached pool."""
    return next((each for each in runtime.detached() if each["name"] == name), None)


class Detaching(Scripted):
    """A detached pool lives on, is commanded by one driver at a time, and ends by its time to live."""

    @pytest.fixture
    def name(self, no_leaks: None, runtime: Runtime) -> Iterator[str]:
        """A name for a pool, which is closed after the test if it is still there."""
        name = f"test-{uuid.uuid4().hex[:8]}"
        yield name
        if isinstance(runtime.executor, Detachable) and published(runtime, name) is not None:
            with contextlib.suppress(ConfigError):  # it has just ended
                runtime.attach(name, own=True).close(grace=1, force=True)

    def start(self, scripts: Scripts, text: str, name: str) -> Driver:
        """Start a driver that has a runtime and knows the name."""
        return scripts.start(HEADER + f"NAME = {name!r}\nruntime = CONNECT\n" + textwrap.dedent(text))

    def test_refused(self, runtime: Runtime) -> None:
        """An engine that ends with its driver can't keep a pool: refused with who can."""
        with self.connect_privately() as private:
            with pytest.raises(CapabilityError) as caught:
                private.reserve(1, cpus=0, detachable=True)
            assert caught.value.capability == "Detachable"
            with pytest.raises(CapabilityError, match="Detachable"):
                private.attach("anything")
            assert not private.children

    @needs(Detachable)
    def test_goes_on(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """The driver that made it ends; the next one finds the roles as they were: state, generator, processes."""
        pytest.importorskip("torch")
        driver = self.start(
            scripts,
            """
            pool, view = new()
            say([view.add(), view.pid(), view.draw()])
            pool.detach(NAME, ttl=300)
            wait()
            """,
            name,
        )
        count, pids, drawn = driver.hear()
        assert count == [1, 1]
        assert driver.end()[0] == 0
        with runtime.attach(name) as pool:
            view = counting(pool)
            assert (view.add(), view.pid()) == ([2, 2], pids)
            assert pool.groups["counting"].line[0].endswith("script.py")
            again = view.draw()
        with runtime.attach(name, own=True) as pool:  # closed for real at the end
            assert counting(pool).add() == [3, 3]
            pool.groups["counting"].close()
            fresh = pool.spawn({"counting": colocate.role(Counting)}, name="counting").role("counting", Counting)
            assert [fresh.draw(), fresh.draw()] == [drawn, again]
        assert published(runtime, name) is None

    @needs(Detachable)
    def test_class_of_a_script(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """A role class that no distribution has comes along by value."""
        driver = self.start(
            scripts,
            """
            class Own(colocate.Role):
                def __init__(self, start):
                    self.value = start

                @colocate.method
                def add(self, number):
                    self.value += number
                    return self.value

            pool = runtime.reserve(1, cpus=0, detachable=True)
            pool.spawn({"own": colocate.role(Own, 40)}, name="own")
            pool.detach(NAME, ttl=300)
            """,
            name,
        )
        assert driver.end()[0] == 0
        with runtime.attach(name) as pool:
            assert pool.groups["own"].role("own").add(2) == [42]

    @needs(Detachable)
    def test_closed_for_its_driver(self, runtime: Runtime, name: str) -> None:
        """After detach the driver's pool, group and residents are closed, and say where it went; nothing is kept."""
        pool, view = new(runtime)
        group, kept = pool.groups["counting"], view.made.keep()
        kept.fetch()
        pool.detach(name, ttl=TTL_S)
        assert not pool.alive
        assert not group.alive
        assert pool not in runtime.children.values()
        for use in (view.add, kept.fetch, lambda: pool.spawn({"echo": colocate.role(Echo)})):
            with pytest.raises(
                ClosedError, match=rf"detaching pool .* as '{name}' at .*detaching.py:\d+; runtime.attach"
            ):
                use()
        with runtime.attach(name) as again:
            assert counting(again).still_kept() == [False, False]

    @needs(Detachable)
    def test_what_detach_refuses(self, runtime: Runtime, name: str) -> None:
        """Calls under way, a taken name, no end, a pool that wasn't reserved for it: the pool stays as it was."""
        with runtime.reserve(1, cpus=0) as plain, pytest.raises(ConfigError, match="detachable=True"):
            plain.detach(name, ttl=TTL_S)
        pool, view = new(runtime, 1)
        other, other_view = new(runtime, 1, "second")
        for ttl in (None, 0, float("inf"), True):
            with pytest.raises(ConfigError, match="how long it lives without a driver"):
                pool.detach(name, ttl=cast("float", ttl))
        with pytest.raises(ConfigError, match="letters"):
            pool.detach("a b", ttl=TTL_S)
        with Gate() as gate:
            call = view.wait_and_add.submit(gate.address)
            with pytest.raises(ColocateError, match=r"calls are pending \(1, the first is counting.wait_and_add\)"):
                pool.detach(name, ttl=TTL_S)
        assert call.result(PATIENCE_S) == [1]
        other.detach(name, ttl=TTL_S)
        with pytest.raises(ConfigError, match=f"there is a detached pool '{name}'"):
            pool.detach(name, ttl=TTL_S)
        assert view.add() == [2]
        pool.close()
        with pytest.raises(ClosedError):
            other_view.add()

    @needs(Detachable)
    def test_who_is_not_there(self, runtime: Runtime, name: str) -> None:
        """Attaching what isn't detached says what is."""
        with pytest.raises(ConfigError, match=f"no pool '{name}' is detached"):
            runtime.attach(name)

    @needs(Detachable)
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
            assert second.epoch == 3
        found = published(runtime, name)
        assert found is not None
        assert found["driver"] is None
        assert 0 < found["left_s"] <= TTL_S

    @needs(Detachable)
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
    def test_borrower_killed_in_a_collective(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """So it does when one rank waits for the other in a collective: the next driver's collectives work."""
        pytest.importorskip("torch")
        pool, view = new(runtime)
        assert view.sum() == [2, 2]
        pool.detach(name, ttl=TTL_S)
        with Gate() as gate, Gate() as come:
            driver = self.start(
                scripts,
                f"""
                pool, view = attached(NAME)
                call = view.sum_at.submit([{gate.address!r}, None], {come.address!r})
                threading.Event().wait()
                """,
                name,
            )
            gate.wait_for()
            come.wait_for()
            driver.process.kill()
            driver.process.wait()
            borrowed = runtime.attach(name)
            call = counting(borrowed).sum.submit()
        assert call.result(PATIENCE_S) == [2, 2]
        borrowed.close()

    @needs(Detachable)
    def test_call_that_stays(
        self, scripts: Scripts, runtime: Runtime, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A call of the driver before that doesn't come back within the grace fails the group, as any hang does."""
        pool, _ = new(runtime)
        pool.detach(name, ttl=TTL_S)
        with Gate() as gate:
            driver = self.start(
                scripts,
                f"""
                pool, view = attached(NAME)
                call = view.wait_and_add.submit({gate.address!r})
                threading.Event().wait()
                """,
                name,
            )
            gate.wait_for(2)
            driver.process.kill()
            driver.process.wait()
            monkeypatch.setattr(colocate.ColocatedGroup, "grace", 0.5)
            mine = runtime.attach(name, own=True)
            error = counting(mine).add.submit().exception(PATIENCE_S)
            mine.close()
        assert "did not come back within 0.5 s" in str(error)
        assert "pass_gate" in str(error)

    @needs(Detachable)
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
                with pytest.raises(ClosedError, match=rf"driver {os.getpid()} on .*\(epoch 3\), who has attached it"):
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
        driver.process.send_signal(signal.SIGSTOP)
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
    def test_time_to_live(self, runtime: Runtime, name: str) -> None:
        """Without a driver for so long it ends by itself; while it has one it doesn't."""
        pool, view = new(runtime)
        workers = Processes(view.pid())
        pool.detach(name, ttl=0.5)
        with runtime.attach(name) as borrowed:
            counting(borrowed).add()
            found = published(runtime, name)
            assert found is not None
            assert found["left_s"] is None
        workers.wait()
        workers.close()
        wait_until(lambda: published(runtime, name) is None, "it is over")
        with pytest.raises((ConfigError, ColocateError)):
            runtime.attach(name)

    @needs(Detachable)
    def test_expired_frees_its_slots(self, runtime: Runtime, name: str) -> None:
        """And its slots can be reserved again."""
        pool, _ = new(runtime)
        pool.detach(name, ttl=0.1)
        wait_until(lambda: published(runtime, name) is None, "it is over")
        again, _ = new(runtime)
        again.detach(name, ttl=TTL_S)  # the name is free as well
        with runtime.attach(name) as borrowed:
            assert counting(borrowed).add() == [1, 1]

    @needs(Detachable)
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
    def test_owner_killed_before_detach(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """Until it is detached it dies with its owner, as any other; its slots are free."""
        driver = self.start(
            scripts,
            """
            pool, view = new()
            say(view.pid())
            threading.Event().wait()
            """,
            name,
        )
        workers = Processes(driver.hear())
        driver.process.kill()
        workers.wait()
        workers.close()
        pool, view = new(runtime)
        assert view.add() == [1, 1]
        pool.close()

    @needs(Detachable)
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
    def test_commands(self, runtime: Runtime, name: str, tmp_path: Path) -> None:
        """`colocate groups` lists it; `colocate close` ends it, by force what a driver is attached to."""
        config = tmp_path / "cluster.yaml"
        config.write_text(json.dumps({"executor": {"use": self.executor, "with": dict(self.options)}}))

        def command(*arguments: str) -> tuple[int, str]:
            run = [sys.executable, "-m", "colocate.cli", *arguments, str(config)]
            found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            return found.returncode, found.stdout + found.stderr

        pool, view = new(runtime)
        workers = Processes(view.pid())
        pool.detach(name, ttl=TTL_S)
        with runtime.attach(name) as borrowed:
            code, text = command("groups")
            (line,) = [line for line in text.splitlines() if line.startswith(name)]
            assert code == 0
            assert "counting (counting)" in line
            assert f"driver {os.getpid()} on" in line
            code, text = command("close", name)
            assert code == 1
            assert f"is attached by driver {os.getpid()} on" in text
            assert f"colocate close {name} --force" in text
            assert counting(borrowed).add() == [1, 1]
            assert command("close", "--force", name) == (0, f"closed: {name}\n")
            wait_until(lambda: not borrowed.alive, "the borrow is over")
            with pytest.raises(ClosedError, match="attached it with own=True"):
                counting(borrowed).add()
        workers.wait()
        workers.close()
        assert published(runtime, name) is None
        again, _ = new(runtime, 1)
        again.detach(name, ttl=TTL_S)
        code, text = command("groups", "--json")
        (found,) = [each for each in json.loads(text)["pools"] if each["name"] == name]
        assert (found["driver"], found["slots"], found["epoch"]) == (None, 1, 1)
        assert command("close", name) == (0, f"closed: {name}\n")
        assert published(runtime, name) is None
        assert command("close", name)[0] == 1

    @needs(Detachable)
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

    @needs(Detachable)
    def test_audit(self, runtime: Runtime, name: str) -> None:
        """A detached pool is no leak; a borrowed one is all there."""
        pool, _ = new(runtime)
        assert not runtime.audit()
        pool.detach(name, ttl=TTL_S)
        assert not runtime.audit()
        with runtime.attach(name) as borrowed:
            counting(borrowed).add()
            assert not runtime.audit()
            assert borrowed.request.id not in [each.id for each in runtime.executor.strays()]

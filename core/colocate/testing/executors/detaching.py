"""Tests of detached pools, which outlive their driver: detach, attach, list, close and expire."""

from __future__ import annotations

import contextlib
import json
import os
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
from colocate.errors import CapabilityError, ClosedError, ColocateError, ConfigError
from colocate.executor import Detachable
from colocate.testing.executors._base import needs, needs_feature
from colocate.testing.executors.drivers import Driver, Scripted, Scripts
from colocate.testing.gate import Gate
from colocate.testing.probes.counting import Counting
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, Processes, wait_until

TTL_S = 300.0  # This is longer than any test takes.

HEADER = """
from colocate.testing.probes.counting import Counting
from colocate.errors import ClosedError

def new(slots=2, **more):
    pool = runtime.reserve(slots, cpus=0, detachable=True, **more)
    return pool, pool.spawn({"counting": colocate.role(Counting)}, name="counting").role("counting", Counting)

def attached(name, **more):
    pool = runtime.attach(name, **more)
    return pool, pool.groups["counting"].role("counting")
"""


def counting_view(pool: Pool) -> Counting:
    """Return the view of the role `Counting` in a pool."""
    return pool.groups["counting"].role("counting", Counting)


def reserve_counting(runtime: Runtime, slots: int = 2, name: str = "counting") -> tuple[Pool, Counting]:
    """Return a new detachable pool, and the view of its role `Counting`."""
    pool = runtime.reserve(slots, cpus=0, detachable=True)
    return pool, pool.spawn({"counting": colocate.role(Counting)}, name=name).role("counting", Counting)


def find_published(runtime: Runtime, name: str) -> dict[str, Any] | None:
    """Return the cluster's entry for a detached pool; None if there is no such pool."""
    return next((pool for pool in runtime.detached() if pool["name"] == name), None)


class DetachedCase(Scripted):
    """The base class of the areas about detached pools."""

    @pytest.fixture
    def name(self, no_leaks: None, runtime: Runtime) -> Iterator[str]:
        """A name for a detached pool, which is closed after the test if the pool still exists."""
        name = f"test-{uuid.uuid4().hex[:8]}"
        yield name
        if isinstance(runtime._node.services.executor, Detachable) and find_published(runtime, name) is not None:
            # The pool may have just ended, or may hang. A test that checks such errors closes the pool itself.
            with contextlib.suppress(ConfigError, BaseExceptionGroup):
                runtime.attach(name, own=True).close(grace=1, force=True)

    def start_driver(self, scripts: Scripts, text: str, name: str) -> Driver:
        """Start a driver script that has a runtime and the pool's name."""
        return scripts.start_script(HEADER + f"NAME = {name!r}\nruntime = CONNECT\n" + textwrap.dedent(text))


class Detaching(DetachedCase):
    """Tests of pools that continue without a driver until their time to live is over."""

    def test_refused(self, runtime: Runtime) -> None:
        """A cluster that ends with its driver refuses detached pools with a `CapabilityError`."""
        with self.connect_privately() as private:
            with pytest.raises(CapabilityError) as caught:
                private.reserve(1, cpus=0, detachable=True)
            assert caught.value.capability == "Detachable"
            with pytest.raises(CapabilityError, match="Detachable"):
                private.attach("anything")
            with pytest.raises(CapabilityError, match="Detachable"):
                private.detached()
            assert not private._node.children
            with (
                private.reserve(1, cpus=0) as pool,
                pytest.raises(CapabilityError, match=r"can't detach pool .*Detachable"),
            ):
                pool.detach("anything", ttl=1)

    @needs(Detachable)
    def test_goes_on(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """After the driver has ended, the next driver finds the same role state, random generators and processes."""
        pytest.importorskip("torch")
        driver = self.start_driver(
            scripts,
            """
            pool, view = new()
            say([view.add(), view.pid(), view.draw()])
            pool.detach(NAME, ttl=300)
            wait()
            """,
            name,
        )
        count, pids, drawn = driver.read_answer()
        assert count == [1, 1]
        assert driver.wait_exit()[0] == 0
        with runtime.attach(name) as pool:
            view = counting_view(pool)
            assert (view.add(), view.pid()) == ([2, 2], pids)
            assert pool.groups["counting"]._node.line[0].endswith("script.py")
            again = view.draw()
        with runtime.attach(name, own=True) as pool:  # Leaving this block closes the pool.
            assert counting_view(pool).add() == [3, 3]
            pool.groups["counting"].close()
            fresh = pool.spawn({"counting": colocate.role(Counting)}, name="counting").role("counting", Counting)
            assert [fresh.draw(), fresh.draw()] == [drawn, again]
        assert find_published(runtime, name) is None

    @needs(Detachable)
    def test_detached_objects_are_closed_for_driver(self, runtime: Runtime, name: str) -> None:
        """After `detach`, the driver's pool, group and residents are closed, and errors say how to attach the pool."""
        pool, view = reserve_counting(runtime)
        group, resident = pool.groups["counting"], view.made.keep()
        resident.fetch()
        pool.detach(name, ttl=TTL_S)
        assert not pool.alive
        assert not group.alive
        assert pool._node not in runtime._node.children.values()
        for use in (view.add, resident.fetch, lambda: pool.spawn({"echo": colocate.role(Echo)})):
            with pytest.raises(
                ClosedError, match=rf"detaching pool .* as '{name}' at .*detaching.py:\d+; runtime.attach"
            ):
                use()
        with runtime.attach(name) as again:
            assert counting_view(again).still_kept() == [False, False]

    @needs(Detachable)
    def test_invalid_detach_is_refused(self, runtime: Runtime, name: str) -> None:
        """`detach` is refused for pending calls, a name in use, an invalid `ttl`, or a pool that isn't detachable."""
        with runtime.reserve(1, cpus=0) as plain, pytest.raises(ConfigError, match="detachable=True"):
            plain.detach(name, ttl=TTL_S)
        pool, view = reserve_counting(runtime, 1)
        other, other_view = reserve_counting(runtime, 1, "second")
        for ttl in (None, 0, float("inf"), float("nan"), True):
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
    def test_time_to_live(self, runtime: Runtime, name: str) -> None:
        """A detached pool ends after its time to live without a driver, but not while a driver is attached."""
        pool, view = reserve_counting(runtime)
        workers = Processes(view.pid())
        pool.detach(name, ttl=0.5)
        with runtime.attach(name) as borrowed:
            counting_view(borrowed).add()
            status = find_published(runtime, name)
            assert status is not None
            assert status["left_s"] is None
        workers.wait_all()
        workers.release_all()
        wait_until(lambda: find_published(runtime, name) is None, "it is over")
        with pytest.raises((ConfigError, ColocateError)):
            runtime.attach(name)

    @needs(Detachable)
    def test_commands(self, runtime: Runtime, name: str, tmp_path: Path) -> None:
        """`colocate groups` lists a detached pool. `colocate close` ends it, by `--force` if a driver is attached."""
        config = tmp_path / "cluster.yaml"
        config.write_text(json.dumps({"executor": {"use": self.executor, "with": dict(self.options)}}))

        def command(*arguments: str) -> tuple[int, str]:
            run = [sys.executable, "-m", "colocate", *arguments, str(config)]
            process = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            return process.returncode, process.stdout + process.stderr

        pool, view = reserve_counting(runtime)
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
            assert counting_view(borrowed).add() == [1, 1]
            assert command("close", "--force", name) == (0, f"closed: {name}\n")
            wait_until(lambda: not borrowed.alive, "the borrow is over")
            with pytest.raises(ClosedError, match=rf"\(colocate close {name}\).*who has taken it"):
                counting_view(borrowed).add()
        workers.wait_all()
        workers.release_all()
        assert find_published(runtime, name) is None
        again, _ = reserve_counting(runtime, 1)
        again.detach(name, ttl=TTL_S)
        code, text = command("groups", "--json")
        (match,) = [row for row in json.loads(text)["pools"] if row["name"] == name]
        assert (match["driver"], match["slots"], match["epoch"]) == (None, 1, 1)
        assert command("close", name) == (0, f"closed: {name}\n")
        assert find_published(runtime, name) is None
        assert command("close", name)[0] == 1

    @needs(Detachable)
    @needs_feature("looking")
    def test_audit(self, runtime: Runtime, name: str) -> None:
        """An audit finds no difference for a detached pool or for a borrowed pool."""
        pool, _ = reserve_counting(runtime)
        assert not runtime.audit()
        pool.detach(name, ttl=TTL_S)
        assert not runtime.audit()
        with runtime.attach(name) as borrowed:
            counting_view(borrowed).add()
            assert not runtime.audit()
            assert borrowed._node.request.id not in [stray.id for stray in runtime._node.services.executor.strays()]

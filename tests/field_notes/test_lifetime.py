"""What others have hit with the lifetime of workers, and why it can't happen here. Numbers are verl's unless named."""

from __future__ import annotations

import gc
import os
from typing import Any

import psutil
import pytest
from tests.distributions.install import Installed
from tests.field_notes.conftest import Script, hear

import colocate
from colocate import ColocatedGroup, Runtime, WorkerDied
from colocate.errors import CallTimeout, ConfigError, PlacementError, PlacementTimeout, RoleStartError
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import FailsToStart, Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, Processes

ROLES: dict[str, Any] = {"echo": colocate.role(Echo), "faulty": colocate.role(Faulty)}


def view_of_a_temporary_group(runtime: Runtime) -> tuple[Echo, str]:
    """As one writes it who has no use for the group itself."""
    group = runtime.reserve(1, cpus=0).spawn(ROLES)
    return group.role("echo", Echo), group.name


def test_actors_vanish_because_a_temporary_group_was_collected(runtime: Runtime) -> None:
    """ "Actors vanish because a temporary worker group was garbage collected; the fix was to keep an extra reference".

    #46, #1365, pull request 1443. The pool owns the group, and the runtime the pool: no variable has to.
    """
    echo, name = view_of_a_temporary_group(runtime)
    gc.collect()
    assert echo.echo(1) == [1]
    del echo
    gc.collect()
    group = runtime.groups[name]
    assert group.role("echo", Echo).echo(2) == [2]
    group.owner.close()


@pytest.mark.parametrize("closing", ["with", "nobody"])
def test_shutting_down_is_noisy_or_hangs(closing: str, script: Script, options: dict[str, Any]) -> None:
    """ "Shutting down is noisy or hangs": #1299, #1664, #1986.

    The end of a driver is silent and bounded, whether it closes by a with block, or leaves a hung role to the exit,
    which then says what it has ended.
    """
    with Gate() as gate:
        driver = script(
            """
            if CLOSING == "with":
                with colocate.connect(**OPTIONS) as runtime, runtime.reserve(1, cpus=0) as pool:
                    pool.spawn(ROLES).role("echo").noop()
            else:
                runtime = colocate.connect(**OPTIONS)
                group = runtime.reserve(1, cpus=0).spawn(ROLES)
                call = group.role("faulty").wait.submit(GATE)
                threading.Thread(target=call.exception, daemon=True).start()
                sys.stdin.readline()
            """,
            CLOSING=closing,
            OPTIONS=options,
            GATE=gate.address,
        )
        if closing == "nobody":
            gate.wait_for()
        _, errors = driver.communicate("\n", timeout=PATIENCE_S)
    assert driver.returncode == 0
    if closing == "with":
        assert errors == ""
    else:
        assert "was never closed" in errors
        assert "did not end within" in errors


def test_orphans_after_a_crash(script: Script) -> None:
    """ "Orphans after a crash": AReaL #622.

    A driver killed by SIGKILL leaves no process, idle or holding the interpreter's lock, and no child of a role.
    """
    with Gate() as holding:
        driver = script(
            """
            from colocate.testing.probes.faulty import Parent
            runtime = colocate.connect(processes=True)
            group = runtime.reserve(2).spawn({**ROLES, "parent": colocate.role(Parent)})
            group.role("parent").start_children()
            group.role("faulty").hold_the_gil.options(ranks=[1]).submit(GATE)
            say("ready")
            threading.Event().wait()
            """,
            GATE=holding.address,
        )
        assert hear(driver) == "ready"
        holding.wait_for()
        family = Processes(child.pid for child in psutil.Process(driver.pid).children(recursive=True))
        holding.open()
        driver.kill()
        family.wait()
        family.close()


@pytest.mark.long  # tests/ray and tests/dask have what it needs of each
def test_a_placement_group_left_from_an_earlier_run_blocks_the_next_one(
    script: Script, ray_options: dict[str, Any], on_ray: Runtime
) -> None:
    """ "A placement group left from an earlier run blocks the next one": #439, #539.

    A run that was killed gives everything back; the next one has the same names and the same CPUs.
    """
    driver = script(
        """
        runtime = colocate.connect("ray", **OPTIONS)
        runtime.reserve(2, cpus=4, name="main").spawn(ROLES, name="policy")
        say("all CPUs are taken")
        threading.Event().wait()
        """,
        OPTIONS=ray_options,
    )
    hear(driver)
    driver.kill()
    with on_ray.reserve(2, cpus=4, name="main", timeout=PATIENCE_S) as pool, pool.spawn(ROLES, name="policy") as group:
        assert group.role("echo", Echo).noop() == [None, None]


def test_a_name_clash_hides_the_real_error(on_processes: Runtime) -> None:
    """ "A name clash hides the real error": #439, #539.

    A group that could not start has told why, and its name is free; a real clash names the other one's line.
    """
    with on_processes.reserve(1) as pool:
        for _ in range(2):
            with pytest.raises(RoleStartError, match="a plain one"):
                pool.spawn({"faulty": colocate.role(FailsToStart, (0,))}, name="policy")
        with (
            pool.spawn(ROLES, name="policy"),
            on_processes.reserve(1) as other,
            pytest.raises(ConfigError, match=r"there is a group 'policy' already, made at .*test_lifetime\.py:\d+"),
        ):
            other.spawn(ROLES, name="policy")


def test_pending_for_ever_without_a_word(runtime: Runtime) -> None:
    """ "Pending for ever without a word": #503, pull request 6663.

    What can never fit is refused at once, what doesn't fit now after its time, both with a table; nothing stays
    pending.
    """
    with pytest.raises(PlacementError) as never:
        runtime.reserve(1, cpus=9)
    ((wanted, total),) = [(row["wanted"], row["total"]) for row in never.value.nodes]
    assert ("9 CPU" in wanted, "8 CPU" in total) == (True, True)
    with runtime.reserve(1, cpus=7):
        with pytest.raises(PlacementTimeout, match="free"):
            runtime.reserve(1, cpus=2, timeout=0.1)
        runtime.reserve(1, cpus=1, timeout=PATIENCE_S).close()  # nothing has got in before


def test_close_does_not_end_a_hung_rank(runtime: Runtime) -> None:
    """ "close() does not end a hung rank": of verl's own redesign, RFC #7839, pull request #7840.

    It does, within its grace period, even when the rank holds the interpreter's lock.
    """
    with Gate() as hung, Gate() as holding:
        pool = runtime.reserve(2, cpus=0)
        group = pool.spawn(ROLES)
        workers = Processes(pid for pid, _, _ in group.role("echo", Echo).place())
        faulty: Any = group.role("faulty")
        faulty.wait.options(ranks=[0]).submit(hung.address)
        faulty.hold_the_gil.options(ranks=[1]).submit(holding.address)
        hung.wait_for()
        holding.wait_for()
        holding.open()
        with pytest.raises(ExceptionGroup):
            pool.close(grace=0.1)
        workers.wait()
        workers.close()


def test_a_dead_rank_stops_the_placement_from_being_released(runtime: Runtime) -> None:
    """ "A dead rank stops the placement from being released": of the same.

    A dead rank counts as closed: all CPUs of the cluster can be had again at once.
    """
    pool = runtime.reserve(2, cpus=4)
    group = pool.spawn(ROLES)
    with pytest.raises(WorkerDied):
        group.role("faulty", Faulty).kill()
    pool.close()
    runtime.reserve(2, cpus=4, timeout=PATIENCE_S).close()


def test_the_ownership_cannot_be_looked_at(on_processes: Runtime) -> None:
    """ "The ownership can't be looked at": of the same.

    The graph shows everything with states and lines, and the audit compares it with what really runs.
    """
    with on_processes.reserve(1, name="ground") as pool, pool.spawn(ROLES, name="policy"):
        text = on_processes.graph.render("tree")
        for words in ("pool ground (", "group policy (", "worker 0 (", "role echo rank 0/1", "test_lifetime.py:"):
            assert words in text
        assert not on_processes.audit()


def test_the_fused_owner_is_not_handed_out(on_processes: Runtime) -> None:
    """ "The fused owner isn't handed out": of the same.

    `spawn` returns it, the pool lists it, and a view says which it belongs to.
    """
    with on_processes.reserve(1) as pool:
        group = pool.spawn(ROLES, name="policy")
        assert isinstance(group, ColocatedGroup)
        assert colocate.inspect(group.role("echo")).group == "policy"
        assert pool.groups["policy"] is group
        group.close()
        assert pool.groups == {}


def test_the_default_deadline_is_none() -> None:
    """ "The default deadline is none": of the same.

    One can be given for all calls of a runtime, and what outlives it ends with stacks.
    """
    with Gate() as gate, colocate.connect(call_timeout=0.05) as runtime, runtime.reserve(1) as pool:
        with pytest.raises(CallTimeout) as late:
            pool.spawn(ROLES).role("faulty", Faulty).wait(gate.address)
        assert "pass_gate" in late.value.stacks[0]
        gate.open()


def test_the_backend_registry_is_private(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "The backend registry is private": of the same.

    An executor from a distribution of its own is connected to by its name.
    """
    folder = installed("outpost")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    with colocate.connect("outpost") as runtime, runtime.reserve(1) as pool:
        assert pool.spawn({"rows": colocate.role(Rows)}).role("rows", Rows).double([1]) == [2]

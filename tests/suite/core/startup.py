"""Start-up of roles and worker processes, their output, and failures to start."""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.suite.probes.crowded import Crowded
from tests.suite.probes.plain import Plain, Talker

import colocate
from colocate import Runtime
from colocate._api.connection import live_connections
from colocate.errors import (
    ColocateError,
    ConfigError,
    PlacementError,
    RoleError,
    RoleStartError,
)
from colocate.executor import OwnProcess
from colocate.testing.executors import startup
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.executors.startup import BORN
from colocate.testing.gate import Gate
from colocate.testing.probes.born import Born
from colocate.testing.probes.faulty import FailsToStart, HangsAtStart
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, wait_until


class Startup(startup.Startup):
    """Spawning: all roles of all ranks, or one error that names each rank."""

    @pytest.mark.parametrize(
        ("error", "options"),
        [
            (RoleStartError, {}),
            (ConfigError, {"no_such_option": 1}),
            (ConfigError, {"slots": 0}),
            (ConfigError, {"on_failure": "hope"}),
            (PlacementError, {"gpus": 1_000_000}),
        ],
        ids=lambda given: given.__name__ if isinstance(given, type) else ",".join(given) or "roles",
    )
    def test_in_one_call_that_fails(
        self, no_leaks: None, runtime: Runtime, error: type[Exception], options: dict[str, Any]
    ) -> None:
        """A one-call spawn that fails raises the original error and closes its runtime."""
        before = set(live_connections)
        with pytest.raises(error) as caught:
            self.spawn_alone({"bad": colocate.role(FailsToStart, (1,))}, **options)
        assert not hasattr(caught.value, "__notes__")
        assert set(live_connections) == before

    def test_every_failure(self, spawn: Spawn) -> None:
        """Constructors that raise give one RoleStartError with the error of every rank."""
        with pytest.raises(RoleStartError) as caught:
            spawn({"echo": colocate.role(Echo), "bad": colocate.role(FailsToStart, (0, 1))}, name="unborn")
        error = caught.value
        assert set(error.errors) == {0, 1}
        for rank, role_error in error.errors.items():
            assert isinstance(role_error, RoleError)
            assert (role_error.group, role_error.role, role_error.rank) == ("unborn", "bad", rank)
            assert isinstance(role_error.__cause__, ValueError)
            assert "in raise_deep_inside" in str(role_error.remote_traceback)
        assert (error.group, error.role, error.rank) == ("unborn", "bad", 0)
        assert "the constructor of role 'bad' raised ValueError on rank 0" in str(error)
        assert "rank 1" in str(error)
        assert isinstance(error.__cause__, ValueError)
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
        assert set(again.errors) == {0, 1}
        assert not hasattr(error, "__notes__")  # No rank hung, so the close adds no note.

    def test_nothing_is_left(self, runtime: Runtime) -> None:
        """After a failed start the slots and the name are free, and the next group starts there."""
        with runtime.reserve(2, cpus=0) as pool:
            with pytest.raises(RoleStartError):
                pool.spawn({"bad": colocate.role(FailsToStart, (0,))}, name="again")
            assert [slot.state for slot in pool.slots] == ["free", "free"]
            assert pool.groups == {}
            group = pool.spawn({"echo": colocate.role(Echo)}, name="again")
            assert group.role("echo", Echo).noop() == [None, None]

    @needs(OwnProcess)
    @needs_feature("rows")
    @needs_feature("pausing")
    @needs_feature("checkpoints")
    @needs_feature("memory")
    @needs_feature("recordings")
    @pytest.mark.parametrize("use", ["rows", "a pause", "a checkpoint", "the memory", "a recording"])
    def test_first_use_without_a_descriptor(self, spawn: Spawn, tmp_path: Path, use: str) -> None:
        """A feature's first use in a worker without free descriptors may fail, and the group stays ready."""
        group = spawn({"crowded": colocate.role(Crowded), "beside": colocate.role(Echo).on(background=True)}, slots=1)
        role = group.role("crowded", Crowded)

        def record() -> None:
            with group.owner.owner.record([role], tmp_path / f"recording-{role.step()}"):
                role.step()

        def pause() -> None:
            group.pause("beside")
            group.resume("beside")

        uses: dict[str, Callable[[], object]] = {
            "rows": lambda: role.double([1, 2]),
            "a pause": pause,
            "a checkpoint": lambda: group.checkpoint(tmp_path / "checkpoint"),
            "the memory": group.memory,
            "a recording": record,
        }
        role.crowd()
        with contextlib.suppress(ColocateError):
            uses[use]()
        role.relieve()
        assert group.state == "ready"
        uses[use]()
        assert role.double([1, 2]) == [2, 4]

    def test_wait_ready_waits_for_starting_group(self, runtime: Runtime, spawn: Spawn) -> None:
        """`wait_ready` waits for a group that another thread is still starting."""
        with ThreadPoolExecutor(1) as other, Gate() as gate:
            started = other.submit(spawn, {"slow": colocate.role(HangsAtStart, gate.address, (1,))})
            gate.wait_for()
            (group,) = (item for item in runtime.groups.values() if item.state == "starting")
            with pytest.raises(TimeoutError, match="it is starting"):
                group.wait_ready(timeout=0)
            gate.open()
            assert group.wait_ready(PATIENCE_S) is None
            assert group.state == "ready"
            assert started.result(PATIENCE_S) is group

    def test_every_mistake(self, spawn: Spawn) -> None:
        """One ConfigError lists all mistakes in a group's roles."""

        class Empty(colocate.Role):
            pass

        with pytest.raises(ConfigError) as caught:
            spawn(
                {
                    "empty": colocate.role(Empty),
                    "far": colocate.role(Rows).on(slots=[7]),
                    "bare": Plain,  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
                    "not a name": colocate.role(Rows),
                }
            )
        text = str(caught.value)
        assert [m.path for m in caught.value.mistakes] == [
            "roles.empty",
            "roles.far",
            "roles.bare",
            "roles.not a name",
        ]
        assert "has no role methods" in text
        assert "slot 7 is named, but the group has 2" in text
        assert "colocate.role(...)" in text

    def test_order_of_construction(self, spawn: Spawn) -> None:
        """Roles are constructed in the order of their declaration, so that a later one finds its siblings."""

        class First(colocate.Role):
            def __init__(self) -> None:
                self.value = 41

            @colocate.method
            def get(self) -> int:
                return self.value

        class Second(colocate.Role):
            def __init__(self) -> None:
                self.value = self.ctx.sibling("first", First).value + 1

            @colocate.method
            def get(self) -> int:
                return self.value

        group = spawn({"first": colocate.role(First), "second": colocate.role(Second)}, slots=1)
        assert group.role("second", Second).get() == [42]


class Templates(startup.Templates):
    """Workers that are forked from a template behave like workers started afresh."""

    @needs(OwnProcess)
    def test_generated_names_are_unique(self, spawn: Spawn) -> None:
        """No two workers, of one group or of two, generate the same names, ids and keys."""
        made_up = [names for _ in range(2) for names in spawn(BORN).role("born", Born).made_up()]
        assert [len(set(column)) for column in zip(*made_up, strict=True)] == [4] * len(made_up[0])

    @needs(OwnProcess)
    def test_threads_of_a_fork(self, runtime: Runtime) -> None:
        """Torch in a forked worker has one thread per CPU of the slot, and computes correctly."""
        with runtime.reserve(1, cpus=1) as pool:
            for _ in range(2):
                with pool.spawn(BORN) as group:
                    assert group.role("born", Born).threads() == [(1, float(1 << 22))]


class Printing(ExecutorCase):
    """A method's output appears on the driver while the method runs."""

    @needs(OwnProcess)
    def test_a_progress_bar(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
        """A progress bar is shown while it runs, and its last state is shown once."""
        monkeypatch.setattr(sys, "stderr", read := io.StringIO())
        talker = spawn({"talker": colocate.role(Talker).on(slots=[0])}, name="bars").role("talker", Talker)
        call = talker.count_to_two.submit(gate.address)
        gate.wait_for()
        wait_until(lambda: "[bars/talker 0] 1 of 2\n" in read.getvalue(), "the bar is shown")
        gate.open()
        call.result()
        wait_until(lambda: "after it" in read.getvalue(), "all is shown")
        assert read.getvalue().endswith("[bars/talker 0] 2 of 2\n[bars/talker 0] after it\n")

    @needs(OwnProcess)
    def test_logs(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
        """Workers log the records that the driver's log levels allow."""
        monkeypatch.setattr(sys, "stderr", read := io.StringIO())
        root, mine = logging.getLogger(), logging.getLogger("colocate_mine")
        monkeypatch.setattr(root, "handlers", [logging.NullHandler()])
        monkeypatch.setattr(root, "level", logging.INFO)
        monkeypatch.setattr(mine, "level", logging.DEBUG)
        talker = spawn({"talker": colocate.role(Talker).on(slots=[0])}, name="logs").role("talker", Talker)
        talker.log(["colocate_mine", "colocate_other"])
        wait_until(lambda: "INFO:colocate_other" in read.getvalue(), "the last line is shown")
        lines = [line for line in read.getvalue().splitlines() if "colocate_" in line]
        shown = ["DEBUG:colocate_mine:said", "INFO:colocate_mine:said", "INFO:colocate_other:said"]
        assert lines == [f"[logs/talker 0] {text}" for text in shown]

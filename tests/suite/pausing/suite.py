"""Pauses of background roles: running calls, queued calls, and the resume."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.suite.core.background import BACKGROUND
from tests.suite.marks import mark_executor_part
from tests.suite.probes.background import Beside

import colocate
from colocate import ColocatedGroup, Runtime
from colocate.errors import CallTimeout, ColocateError, ConfigError, RoleError
from colocate.executor import Detachable, OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.executors.detaching import TTL_S, DetachedCase
from colocate.testing.gate import Gate
from colocate.testing.probes.collectives import Collective
from colocate.testing.waiting import PATIENCE_S, wait_until


class PausingSuite(ExecutorCase):
    """`group.pause` and `group.resume`."""

    @pytest.fixture
    def two_lanes(self, spawn: Spawn) -> ColocatedGroup:
        """Spawn a group with a role of each lane, on two slots."""
        return spawn({"train": colocate.role(Beside), "roll": BACKGROUND})

    @pytest.mark.long
    def test_slow_call_of_a_paused_role(
        self, two_lanes: ColocatedGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The warning about a slow call says that the call's role is paused."""
        roll = two_lanes.role("roll", Beside)
        monkeypatch.setattr("colocate._api.slow.SLOW_S", 0.05)
        two_lanes.pause("roll")
        waits = roll.do.submit("waits")
        wait_until(lambda: "paused until group.resume('roll')" in caplog.text, "the warning has been given")
        two_lanes.resume("roll")
        waits.result(PATIENCE_S)

    @needs(OwnProcess)
    def test_an_abort_leaves_process_groups(self, spawn: Spawn) -> None:
        """A deadline or pause that aborts a background call ends no collective of another role."""
        pytest.importorskip("torch")
        group = spawn({"train": colocate.role(Collective), "roll": BACKGROUND})
        train, roll = group.role("train", Collective), group.role("roll", Beside)
        assert train.sum(1.0) == [2.0, 2.0]
        with Gate() as gate, Gate() as amid:
            late = roll.generate.options(timeout=0.2).submit(gate.address)
            gate.wait_for(2)
            step = train.sum_at.submit([amid.address, None], 1.0, failing=-1)  # type: ignore[arg-type]
            amid.wait_for()
            with pytest.raises(CallTimeout, match=r"roll\.generate"):
                late.result(PATIENCE_S)
            assert roll.do("back")
            roll.generate.submit(gate.address)
            gate.wait_for(2)
            group.pause("roll", how="abort", timeout=PATIENCE_S)
            amid.open()
            assert step.result(PATIENCE_S) == [2.0, 2.0]
        assert train.sum(1.0) == [2.0, 2.0]

    @mark_executor_part
    @pytest.mark.parametrize("name", ["generate", "generate_async"])
    @needs_feature("weights")
    def test_a_generation_is_kept(self, two_lanes: ColocatedGroup, name: str) -> None:
        """A paused generation gets new weights between two steps, and its steps report their versions."""
        pytest.importorskip("torch")
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        with Gate() as gate:
            running = getattr(roll, name).submit(gate.address)
            gate.wait_for(2)
            two_lanes.pause("roll", how="keep", timeout=PATIENCE_S)
            queued = roll.do.submit("queued")
            assert colocate.sync_weights(train, roll, timeout=PATIENCE_S).version == 1
            assert not running.done()
            two_lanes.resume("roll")
        for steps in running.result(PATIENCE_S):
            versions = [version for version, _ in steps]
            assert versions == sorted(versions)
            assert [version for version, changed in steps if changed] == [1]
        assert [generation for _, generation in queued.result(PATIENCE_S)] == [1, 1]

    @needs(OwnProcess)
    def test_a_background_role_sleeps(self, two_lanes: ColocatedGroup) -> None:
        """A background role can sleep between its calls, and during a paused generation."""
        pytest.importorskip("torch")
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        assert two_lanes.sleep("roll") == two_lanes.wake("roll")
        with Gate() as gate:
            running = roll.generate.submit(gate.address)
            gate.wait_for(2)
            two_lanes.pause("roll", how="keep", timeout=PATIENCE_S)
            colocate.sync_weights(train, roll, timeout=PATIENCE_S)
            assert two_lanes.sleep("roll", timeout=PATIENCE_S) == two_lanes.wake("roll", timeout=PATIENCE_S)
            assert not running.done()
            two_lanes.resume("roll")
        assert [steps[-1][1] for steps in running.result(PATIENCE_S)] == [True, True]

    @mark_executor_part
    @pytest.mark.parametrize("name", ["play", "produce", "produce_async"])
    @needs_feature("weights")
    @needs_feature("rows")
    def test_a_stream_beside_a_trainer(self, two_lanes: ColocatedGroup, name: str) -> None:
        """A stream beside a trainer can be paused to sync weights between rows, and its rows report their versions."""
        pytest.importorskip("torch")
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        count, values = 1200, {}
        with getattr(roll, name).stream([*range(count)]) as rows:
            for index, value in rows:
                values[index] = value
                if len(values) % 100 == 0:
                    train.do("beside")
                if len(values) == 100:
                    with pytest.raises(ColocateError, match="comes after the stream of roll"):
                        colocate.sync_weights(train, roll)
                if len(values) % 400 == 0:
                    two_lanes.pause("roll", how="keep", timeout=PATIENCE_S)
                    colocate.sync_weights(train, roll, timeout=PATIENCE_S)
                    two_lanes.resume("roll")
        assert sorted(values) == [*range(count)]
        assert all(row == index for index, (row, _) in values.items())
        versions = [version for _, version in values.values()]
        assert max(versions) >= 1
        assert versions[0] == 0
        with getattr(roll, name).stream([*range(count)]) as rows:
            next(rows)
            two_lanes.pause("roll", how="keep", timeout=PATIENCE_S)
        two_lanes.resume("roll")
        assert len(roll.do("after")) == 2

    @needs_feature("weights")
    @needs_feature("rows")
    def test_wait_behind_stream_elsewhere_is_refused(self, two_lanes: ColocatedGroup, spawn: Spawn) -> None:
        """A wait for a call behind a half-read stream is refused at once, also in another lane or group."""
        pytest.importorskip("torch")
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        other = spawn({"other": colocate.role(Beside)}).role("other", Beside)
        behind = r"which comes after the stream of roll\.play that was opened at \S+:\d+, .* it would wait for itself"
        with roll.play.stream([*range(1000)]) as rows:
            next(rows)
            resident = roll.give.keep(1)
            for role in (train, other):
                with pytest.raises(ColocateError, match=f"give waits for roll.give, {behind}"):
                    role.give(resident.ref)
            waiting_calls = [role.give.submit(resident.ref) for role in (train, other)]
            for role in (train, other):
                with pytest.raises(ColocateError, match=f"give waits for roll.give, {behind}"):
                    role.give(2)
        assert [call.result(PATIENCE_S) for call in waiting_calls] == [[[1, 1], [1, 1]]] * 2
        with roll.play.stream([*range(1000)]) as rows:
            next(rows)
            sync = colocate.sync_weights.submit(train, roll)
            with pytest.raises(ColocateError, match=f"train.give waits for the sync of train to roll, {behind}"):
                train.give(1)
        assert sync.result(PATIENCE_S).version == 1
        with roll.play.stream([*range(1000)]) as rows:
            next(rows)
            sync = colocate.sync_weights.submit(other, roll)
            with pytest.raises(ColocateError, match=f"other.give waits for the sync of other to roll, {behind}"):
                other.give(1)
            with pytest.raises(ColocateError, match=f"pause of role 'roll' {behind.removeprefix('which ')}"):
                two_lanes.pause("roll", how="wait")
            two_lanes.pause("roll", how="keep", timeout=PATIENCE_S)
            assert other.give(1) == train.give(1) == [1, 1]
        assert sync.result(PATIENCE_S).version == 2
        two_lanes.resume("roll")

    @needs_feature("weights")
    @needs_feature("rows")
    def test_rows_that_wait_for_tools(self, two_lanes: ColocatedGroup) -> None:
        """A pause doesn't wait for resting rows, which continue after the resume."""
        pytest.importorskip("torch")
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        with Gate() as gate:
            rows = roll.use_tool.submit([*range(4)], gate.address)
            gate.wait_for(2)
            two_lanes.pause("roll", how="keep", timeout=PATIENCE_S)
            assert colocate.sync_weights(train, roll, timeout=PATIENCE_S).version == 1
            gate.open()
            assert len(train.do("beside")) == 2
            assert not rows.done()
            two_lanes.resume("roll")
        assert rows.result(PATIENCE_S) == [(row, 1) for row in range(4)]

    @needs_feature("weights")
    @needs_feature("looking")
    def test_a_pause_waits(self, two_lanes: ColocatedGroup) -> None:
        """A pause waits for running calls and holds queued ones; a pause that times out has no effect."""
        pytest.importorskip("torch")
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        with Gate() as gate:
            running = roll.do.submit("running", gate.address)
            gate.wait_for(2)
            with pytest.raises(
                TimeoutError, match=r"role 'roll' .* isn't paused after 0\.1 s, and keeps running: .*slot 0, 1"
            ):
                two_lanes.pause("roll", timeout=0.1)
            queued = roll.do.submit("queued")
            gate.open()
            assert running.result(PATIENCE_S)
            assert queued.result(PATIENCE_S)
        two_lanes.pause("roll")
        waits, late = roll.do.submit("waits"), roll.do.options(timeout=0.1).submit("late")
        with pytest.raises(CallTimeout, match=r"role 'roll' is paused until group.resume\('roll'\)"):
            late.result(PATIENCE_S)
        shown = two_lanes.owner.owner.graph.render()
        assert re.search(r"role roll rank 0/2 \(.*paused", shown), shown
        assert not re.search(r"role train rank 0/2 \(.*paused", shown), shown
        assert colocate.sync_weights(train, roll, timeout=PATIENCE_S).version == 1
        assert not waits.done()
        two_lanes.pause("roll", how="abort")
        two_lanes.resume("roll")
        assert [generation for _, generation in waits.result(PATIENCE_S)] == [1, 1]
        two_lanes.resume("roll")

    @pytest.mark.parametrize("name", ["generate", "wait"])
    def test_a_pause_aborts(self, two_lanes: ColocatedGroup, name: str) -> None:
        """The error of a call that a pause aborts names the pause, and the role works after the resume."""
        roll = two_lanes.role("roll", Beside)
        with Gate() as gate:
            running = roll.generate.submit(gate.address) if name == "generate" else roll.wait.submit(gate.address)
            gate.wait_for(2)
            two_lanes.pause("roll", how="abort", timeout=PATIENCE_S)
            with pytest.raises(RoleError, match=rf"roll\.{name} was aborted: group\.pause\('roll', how='abort'\)"):
                running.result(PATIENCE_S)
            two_lanes.resume("roll")
            assert len(roll.do("after")) == 2

    @needs_feature("weights")
    def test_pauses_of_several_threads(self, two_lanes: ColocatedGroup) -> None:
        """The last pause or resume counts, earlier waiters get an error, and a failed pause keeps the one before."""
        pytest.importorskip("torch")
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        with Gate() as gate, ThreadPoolExecutor() as pool:
            running = roll.generate.submit(gate.address)
            gate.wait_for(2)
            waits = pool.submit(two_lanes.pause, "roll")
            wait_until(lambda: two_lanes._node.is_paused("roll"), "it waits")
            two_lanes.resume("roll")
            with pytest.raises(ColocateError, match=r"role 'roll' .* was resumed by another thread"):
                waits.result(PATIENCE_S)
            waits = pool.submit(two_lanes.pause, "roll")
            wait_until(lambda: two_lanes._node.is_paused("roll"), "it waits")
            two_lanes.pause("roll", how="keep", timeout=PATIENCE_S)
            with pytest.raises(ColocateError, match=r"role 'roll' .* was paused anew by another thread"):
                waits.result(PATIENCE_S)
            with pytest.raises(TimeoutError, match=r"isn't paused after 0\.1 s, and is unchanged"):
                two_lanes.pause("roll", timeout=0.1)
            assert colocate.sync_weights(train, roll, timeout=PATIENCE_S).version == 1
            assert not running.done()
            two_lanes.resume("roll")
        assert len(running.result(PATIENCE_S)) == 2

    @pytest.mark.parametrize("before", [True, False])
    @needs_feature("weights")
    def test_pauses_and_residents(self, two_lanes: ColocatedGroup, before: bool) -> None:
        """A pause completes residents that others use; a sync that would wait for a paused resident is refused."""
        pytest.importorskip("torch")
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        with Gate() as gate:
            roll.generate.submit(gate.address)
            gate.wait_for(2)
            used = train.give.submit(roll.give.keep("early").ref)
            held = roll.do.submit("held")
            sync = colocate.sync_weights.submit(train, roll) if before else None
            two_lanes.pause("roll", how="abort", timeout=PATIENCE_S)
        assert used.result(PATIENCE_S) == [["early"] * 2] * 2
        assert (sync or colocate.sync_weights.submit(train, roll)).result(PATIENCE_S).version == 1
        assert not held.done()
        used = train.give.submit(roll.give.keep("late").ref)
        refusal = r"the sync of train to roll would wait for train\.give, .* what roll\.give makes.*resume\('roll'\)"
        for send in (colocate.sync_weights, colocate.sync_weights.submit):
            with pytest.raises(ColocateError, match=refusal):
                send(train, roll)
        two_lanes.resume("roll")
        assert used.result(PATIENCE_S) == [["late"] * 2] * 2
        assert colocate.sync_weights(train, roll).version == 2

    @needs_feature("memory")
    def test_invalid_options_and_roles_are_refused(self, spawn: Spawn, two_lanes: ColocatedGroup) -> None:
        """Swap residency, wrong options and pauses of foreground roles are refused."""
        with pytest.raises(ConfigError, match=r'residency="swap": .*roll is to run in the background'):
            spawn({"train": colocate.role(Beside), "roll": BACKGROUND}, residency="swap", device_memory="1GiB")
        with pytest.raises(ConfigError, match="background='yes': it is true or false"):
            colocate.role(Beside).on(background="yes")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is no background role"):
            two_lanes.pause("train")
        with pytest.raises(ConfigError, match="no such role; its background roles: roll; did you mean 'roll'"):
            two_lanes.resume("rol")
        with pytest.raises(ConfigError, match="it is 'wait', 'keep' or 'abort'"):
            two_lanes.pause("roll", how="kepp")  # type: ignore[arg-type]


class PausesOfDetached(DetachedCase):
    """An attach to a group whose background role was paused."""

    @mark_executor_part
    @needs_feature("memory")
    @needs(Detachable)
    def test_background_roles_go_on(self, runtime: Runtime, name: str) -> None:
        """For the next driver roles keep their own lanes, and the previous driver's pause is over."""
        roles = {"train": colocate.role(Beside), "roll": colocate.role(Beside).on(background=True)}
        pool = runtime.reserve(2, cpus=0, detachable=True)
        group = pool.spawn(roles, name="lanes")
        group.role("roll", Beside).do("first")
        group.pause("roll")
        pool.detach(name, ttl=TTL_S)
        pool = runtime.attach(name, own=True)
        group = pool.groups["lanes"]
        train, roll = group.role("train", Beside), group.role("roll", Beside)
        assert train.read() == [[]] * 2
        assert roll.read() == [["first"]] * 2  # Both roles are awake now; a wake takes a place in both orders.
        memory: Any = group._node.get_part("memory")
        wait_until(lambda: not memory.sleepers.marks, "the driver knows")  # Else another wake waits for `roll`.
        with Gate() as gate:
            running = roll.do.submit("second", gate.address)
            gate.wait_for(2)
            assert len(train.do("beside")) == 2
            with pytest.raises(TimeoutError, match="isn't paused"):
                group.pause("roll", timeout=0.1)
        assert len(running.result(PATIENCE_S)) == 2
        assert roll.read() == [["first", "second"]] * 2
        pool.close()


AREAS = [PausingSuite, PausesOfDetached]

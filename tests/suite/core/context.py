"""Role code's context, its torch settings, and the devices of its argument tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from tests.suite.probes.settings import (
    Batch,
    DeviceReader,
    SettingsChanger,
    list_devices_on_worker,
    read_settings_on_worker,
)

import colocate
from colocate import ColocatedGroup, ColocateError, Runtime
from colocate._role.context import derive_seed
from colocate.errors import RoleError
from colocate.executor import Boot, Host, HostEvents, OwnProcess, Place
from colocate.testing.executors import context
from colocate.testing.executors._base import Spawn, needs_feature
from colocate.testing.executors.tensors import TensorCase
from colocate.testing.gate import Gate
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.probes.tensors import Tensors
from colocate.testing.waiting import wait_until


class Contexts(context.Contexts):
    """Contexts of role code: siblings, rows, progress and random numbers."""

    def test_no_context_on_the_driver(self) -> None:
        """The driver has no context, and `colocate.context()` raises an error that says so."""
        with pytest.raises(ColocateError, match="inside role code only"):
            colocate.context()

    def test_sibling(self, pair: ColocatedGroup) -> None:
        """`ctx.sibling` returns the other role's instance in this worker, for direct calls of its methods."""
        assert pair.role("echo", Echo).ask_sibling("other") == [("another", 0), ("another", 1)]

    def test_missing_sibling(self, pair: ColocatedGroup) -> None:
        """A missing sibling, or one of another class, raises an error with the actual roles or class."""
        with pytest.raises(RoleError, match=r"asked for its sibling 'faulty' as a Echo, but it is a Faulty"):
            pair.role("echo", Echo).ask_sibling("faulty")
        with pytest.raises(RoleError, match=r"asked for its sibling 'nobody', but slot \d .* has \['echo', 'faulty'"):
            pair.role("echo", Echo).ask_sibling("nobody")

    def test_threads_of_a_role(self, pair: ColocatedGroup) -> None:
        """A thread that a role starts has the role's context by `self.ctx`."""
        assert pair.role("echo", Echo).from_a_thread() == [(0, 0), (1, 1)]

    def test_valid_rows(self, pair: ColocatedGroup) -> None:
        """`ctx.valid_rows` is the number of real rows in a rank's part of a batch."""
        assert [valid for _, valid in pair.role("rows", Rows).maybe_empty([1, 2, 3])] == [2, 1]

    def test_progress(self, pair: ColocatedGroup) -> None:
        """`ctx.progress` reaches the driver while the method runs."""
        with Gate() as gate:
            call = pair.role("echo", Echo).progress_at.submit(gate.address, 3, 10)
            gate.wait_for(2)
            workers = pair._node.workforce.workers
            wait_until(lambda: all(w.progress.get("echo") == (3, 10) for w in workers), "progress has come")
        call.result()

    def test_seed(self, pair: ColocatedGroup) -> None:
        """Each role and rank has its own seed, which depends on the runtime's seed."""
        seeds = [fact["seed"] for role in ("echo", "other") for fact in pair.role(role, Echo).who()]
        with self.connect(seed=1) as runtime, runtime.reserve(1, cpus=0) as pool:
            group = pool.spawn({"echo": colocate.role(Echo)}, name=pair.name)
            seeds += [fact["seed"] for fact in group.role("echo", Echo).who()]
        assert len(set(seeds)) == 5

    def test_generator(self, pair: ColocatedGroup) -> None:
        """`ctx.generator` draws the same numbers on every executor, by runtime seed, group, role and rank alone.

        On another device torch draws other numbers from the same seed.
        """
        torch = pytest.importorskip("torch")
        assert (pair._node.services.seed, pair.name) == (0, "pair")
        for name, seeds in SEEDS.items():
            drawn = [torch.rand(2, generator=_make_generator(self.device, seed), device=self.device) for seed in seeds]
            numbers = pair.role(name, Tensors).random_from_start(2)
            assert torch.equal(numbers, torch.cat(drawn).cpu()), name
            if self.device == "cpu":
                assert torch.equal(numbers, torch.tensor(DRAWN[name])), name

    def test_generator_after_a_failure(self, spawn: Spawn) -> None:
        """A call that fails on one rank leaves every rank's generator as before the call."""
        torch = pytest.importorskip("torch")
        drawing = spawn({"tensors": colocate.role(Tensors)}, name="drawing").role("tensors", Tensors)
        seeds = [derive_seed(0, "drawing", "tensors", rank) for rank in (0, 1)]
        generators = [_make_generator(self.device, seed) for seed in seeds]
        for failing in (0, 1, 0):  # The first failure comes before any other draw.
            with pytest.raises(RoleError, match="a bad draw"):
                drawing.random_but(3, failing)
            expected = [torch.rand(2, generator=generator, device=self.device) for generator in generators]
            assert torch.equal(drawing.random(2), torch.cat(expected).cpu())


def _make_generator(device: str, seed: int) -> Any:
    import torch

    return torch.Generator(device=device).manual_seed(seed)


SEEDS = {
    "tensors": [derive_seed(0, "pair", "tensors", rank) for rank in (0, 1)],
    "right_tensors": [derive_seed(0, "pair", "right_tensors", 0)],
}
# For seed 0, two numbers on each rank, on the CPU.
DRAWN = {
    "tensors": [0.3498905897140503, 0.9317374229431152, 0.39299720525741577, 0.3361614942550659],
    "right_tensors": [0.9086410403251648, 0.8518476486206055],
}


USUAL = {"grad": True, "inference": False, "autocast": None, "dtype": "torch.float32", "device": "cpu"}
SET = {"grad": False, "inference": True, "autocast": "torch.float16"}


class TorchSettings(TensorCase):
    """Torch's settings across calls: grad mode, inference mode, autocast, default dtype and default device."""

    @pytest.fixture
    def dtype(self, runtime: colocate.Runtime) -> bool:
        """Return whether workers have their own processes, so that a role may set the default dtype."""
        return isinstance(runtime._node.services.executor, OwnProcess)

    @pytest.fixture
    def changed(self, dtype: bool) -> dict[str, Any]:
        """Return the settings after a change."""
        return {**SET, "dtype": "torch.float64" if dtype else "torch.float32", "device": "meta"}

    @pytest.fixture
    def group(self, torch: Any, spawn: Spawn, dtype: bool) -> ColocatedGroup:
        """Spawn a role that changes settings in its constructor, between two roles that don't."""
        plain, changing = (
            colocate.role(SettingsChanger, dtype=dtype),
            colocate.role(SettingsChanger, changes=True, dtype=dtype),
        )
        return spawn({"first": plain, "changing": changing, "last": plain}, slots=1)

    @needs_feature("functions")
    def test_constructor_settings_hold_for_one_role(self, group: ColocatedGroup, changed: dict[str, Any]) -> None:
        """A constructor's settings hold in its own role's methods, sync and async, and nowhere else."""
        for _ in range(2):
            for name, expected in (("first", USUAL), ("changing", changed), ("last", USUAL)):
                role = group.role(name, SettingsChanger)
                assert role.read_settings() == role.soon() == [expected]
            assert group.run(read_settings_on_worker) == [USUAL]

    @needs_feature("pipelines")
    def test_between_awaits(self, group: ColocatedGroup, changed: dict[str, Any]) -> None:
        """An async method keeps its settings across awaits, blocks and tasks, whatever runs between."""
        first, changing = group.role("first", SettingsChanger), group.role("changing", SettingsChanger)
        with group.pipeline():
            calls = [first.across.submit(True), changing.across.submit(False), first.across.submit(False)]
            settings = first.read_settings.submit()
        in_blocks = {**USUAL, **SET, "device": "meta"}
        for call, expected in zip(calls, (in_blocks, changed, USUAL), strict=True):
            assert call.result() == [[expected] * 12]
        assert settings.result() == [USUAL]
        assert first.read_settings() == [USUAL]

    @needs_feature("functions")
    def test_method_settings_end_with_the_call(self, group: ColocatedGroup, changed: dict[str, Any]) -> None:
        """Settings that a method leaves behind are dropped before the next call of any role, also after an error."""
        first = group.role("first", SettingsChanger)
        assert first.change_settings() == [changed]
        assert first.read_settings() == [USUAL]
        first.change_settings()
        assert group.role("last", SettingsChanger).read_settings() == [USUAL]
        first.change_settings()
        assert group.run(read_settings_on_worker) == [USUAL]
        with pytest.raises(RoleError, match="on purpose"):
            first.change_and_fail()
        assert group.role("last", SettingsChanger).soon() == [USUAL]


# torch's device without contents needs no hardware, and shows where a tensor was put.
AWAY = "meta"


class Devices(TensorCase):
    """Slots whose device isn't the CPU."""

    @pytest.fixture
    def away(
        self, torch: Any, no_leaks: None, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[ColocatedGroup]:
        """Spawn a group whose two workers are given the `meta` device."""
        launch = runtime._node.services.executor.launch

        def elsewhere(place: Place, boot: Boot, events: HostEvents) -> Host:
            return launch(place, attrs.evolve(boot, device=AWAY), events)

        monkeypatch.setattr(runtime._node.services.executor, "launch", elsewhere)
        with runtime.reserve(2, cpus=0) as pool:
            yield pool.spawn({"placed": colocate.role(DeviceReader, [torch.ones(1), Batch(torch.ones(1))])})

    @needs_feature("pipelines")
    @needs_feature("functions")
    def test_arguments_arrive_on_the_device(self, torch: Any, away: ColocatedGroup) -> None:
        """Tensors of values, residents and fetched residents arrive on the device by every dispatch and call."""
        placed, devices = away.role("placed", DeviceReader), [AWAY] * 2
        with placed.make.keep(1) as resident:
            for x in (torch.ones(2, 2), resident.ref, resident.fetch()):
                assert placed.broadcast(x) == devices
                assert placed.scattered(x) == devices
                assert placed.soon(x) == devices
                assert placed.broadcast({"deep": [x]}) == [{"deep": [AWAY]}] * 2
                assert away.run(list_devices_on_worker, x) == devices
                with away.pipeline():
                    device_call = placed.scattered.submit(x)
                assert device_call.result() == devices

    @needs_feature("rows")
    def test_rows_arrive_on_the_device(self, torch: Any, away: ColocatedGroup) -> None:
        """Tensors of per-rank arguments arrive on the slot's device."""
        assert away.role("placed", DeviceReader).each([torch.ones(2, 2)] * 2) == [AWAY] * 2

    @needs_feature("kinds")
    def test_nested_tensors_arrive_on_the_device(self, torch: Any, away: ColocatedGroup) -> None:
        """Tensors inside records, modules and TensorDicts arrive on the slot's device."""
        placed, devices = away.role("placed", DeviceReader), [AWAY] * 2
        assert placed.broadcast(Batch(torch.ones(1))) == devices
        assert placed.broadcast([torch.nn.Linear(1, 1)]) == [[devices]] * 2
        with placed.make_record.keep() as resident:
            assert placed.broadcast(resident.ref) == placed.broadcast(resident.fetch()) == [devices] * 2
        tensordict = pytest.importorskip("tensordict")
        assert placed.scattered(tensordict.TensorDict({"a": torch.ones(2)}, [2])) == devices

    def test_some_stay_on_the_host(self, torch: Any, away: ColocatedGroup) -> None:
        """Tensors of parameters named by `host=`, and of constructor arguments, arrive on the host."""
        placed = away.role("placed", DeviceReader)
        with placed.make.keep(1) as resident:
            for x in (torch.ones(2, 2), resident.ref, resident.fetch()):
                for lengths in (torch.ones(2, 2), resident.ref, resident.fetch()):
                    assert placed.mixed(x, lengths, more=Batch(torch.ones(1))) == [[AWAY, "cpu", "cpu"]] * 2
        assert placed.constructed() == [["cpu", "cpu"]] * 2

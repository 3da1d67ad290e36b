"""Slots with a GPU: the core of the executor suite, and behaviour that only CUDA shows. One NVIDIA GPU is needed.

The slots of these tests share the machine's first GPU, so that two of them fit wherever there is one. With
COLOCATE_GPU_DRY=1, tests that need no CUDA run on slots of the CPU, to try out the tests themselves.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import attrs
import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from tests.suite.checkpoints.saving import SavingBeside  # noqa: E402
from tests.suite.children.suite import Children  # noqa: E402
from tests.suite.memory.sleeping import SleepingAmidSteps  # noqa: E402
from tests.suite.probes.sleepers import Dozing  # noqa: E402
from tests.suite.probes.trainers import Kind, Renewing, Where, train_alone  # noqa: E402
from tests.suite.profiling.suite import Profiling  # noqa: E402
from tests.suite.rows.suite import Streams  # noqa: E402
from tests.suite.weights.suite import WeightSyncs, WeightSyncsBetween  # noqa: E402
from tests.suite.whole import (  # noqa: E402
    Background,
    Calls,
    Contexts,
    Dispatching,
    Failures,
    RandomNumbers,
    Residents,
    Sharing,
    TensorResidents,
)

import colocate  # noqa: E402
from colocate import Broadcast, ColocatedGroup, Concat, First, Gather, Role, Runtime, Scatter, gpus, method  # noqa: E402
from colocate._api.connection import Connection  # noqa: E402
from colocate.errors import PlacementError, RoleError, WorkerDied  # noqa: E402
from colocate.executor import Node  # noqa: E402
from colocate.keeper import forks  # noqa: E402
from colocate.placement import Ledger  # noqa: E402
from colocate.testing.executors import ExecutorCase  # noqa: E402
from colocate.testing.waiting import wait_until  # noqa: E402
from colocate.torch import host_copy  # noqa: E402
from colocate_local.processes import LocalProcesses  # noqa: E402
from colocate_local.threads import LocalThreads  # noqa: E402
from colocate_rollout import Sampling  # noqa: E402
from colocate_rollout.testing import LLAMA, PROMPTS, Trainer, change_weights, log_probs  # noqa: E402

DRY = os.environ.get("COLOCATE_GPU_DRY") == "1" and not torch.cuda.is_available()
DEVICE = "cpu" if DRY else "cuda:0"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (DRY or torch.cuda.is_available()), reason="needs CUDA")]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
SLOTS = 8
ALL = Node(platform.node(), None, SLOTS)  # All slots are on one GPU.


class OneGpu(LocalProcesses):
    """Processes whose GPU is always the job's first one."""

    def __init__(self) -> None:
        super().__init__(attrs.evolve(ALL, gpus=0))
        self._node, self._ledger = ALL, Ledger([ALL], self._device_name)
        self._gpus = gpus.names(1) * SLOTS

    @staticmethod
    def _device_name(devices: tuple[int, ...]) -> str:
        return DEVICE


class OneGpuOfThreads(LocalThreads):
    def __init__(self) -> None:
        super().__init__(attrs.evolve(ALL, gpus=0), strict=False)
        self._node, self._ledger = ALL, Ledger([ALL], self._device_name)

    @staticmethod
    def _device_name(devices: tuple[int, ...]) -> str:
        return DEVICE


class GpuRuntime(Runtime):
    """A runtime whose slots have a GPU each by default."""

    def reserve(self, slots: int = 1, gpus: int = 1, **options: Any) -> colocate.Pool:  # type: ignore[override]
        return super().reserve(slots, gpus, **options)


def connect(seed: int = 0, strict: bool = False, threads: bool = False) -> Runtime:
    executor = OneGpuOfThreads() if threads else OneGpu()
    return GpuRuntime._wrap(Connection("local", executor, seed, strict, None, 60.0, None, None, None))


@contextlib.contextmanager
def spawned(roles: Any, threads: bool = False, **options: Any) -> Iterator[ColocatedGroup]:
    """Spawn a group on one slot of its own runtime."""
    with connect(threads=threads) as runtime:
        yield runtime.reserve().spawn(roles, **options)


class TestCore(Calls, Dispatching, Contexts, RandomNumbers, Residents, TensorResidents, Failures):
    """The suite's core, on slots with a GPU."""

    device: ClassVar[str] = DEVICE

    def connect(self, **more: Any) -> Runtime:
        return connect(**more)

    def connect_privately(self, **more: Any) -> Runtime:
        return connect(**more)


class TestChildren(ExecutorCase):
    """A child of a role on a GPU."""

    device: ClassVar[str] = DEVICE
    test_weights_reach_child = Children.test_weights_reach_child

    def connect(self, **more: Any) -> Runtime:
        return connect(**more)


class TestRows(Streams):
    """Rows whose tensors lie on a GPU, and whose random numbers are drawn there."""

    device: ClassVar[str] = DEVICE
    test_ranks_that_work_on_the_same_rows = None  # NCCL allows one rank on a GPU.

    def connect(self, **more: Any) -> Runtime:
        return connect(**more)


class TestWeights(WeightSyncs, WeightSyncsBetween):
    """Weight syncs in a slot with a GPU, and from one worker's GPU memory to another worker's."""

    device: ClassVar[str] = DEVICE
    test_sharded_weights = None  # NCCL allows one rank on a GPU.

    def connect(self, **more: Any) -> Runtime:
        return connect(**more)

    def connect_privately(self, **more: Any) -> Runtime:
        return connect(**more)


class Spinner(Role):
    """A role with a long kernel, and with a short one to run beside it."""

    def __init__(self) -> None:
        self.x = torch.zeros(64, device=self.ctx.device)

    @method(collect=First())
    def spin(self) -> float:
        torch.cuda._sleep(4 * 10**9)  # This takes some two seconds.
        return float(self.x[0])  # This waits for its own stream.

    @method(collect=Concat())
    def add(self, value: float) -> torch.Tensor:
        self.x.add_(value)
        return self.x.clone()


class TestBackground(Background):
    """Background roles, each with a stream of its own on a GPU."""

    device: ClassVar[str] = DEVICE

    def connect(self, **more: Any) -> Runtime:
        return connect(**more)

    @needs_cuda
    def test_main_lane_ignores_background_kernel(self) -> None:
        """Calls of the main lane, and fetches and releases of their results, don't wait for a background kernel."""
        roles = {"train": colocate.role(Spinner), "roll": colocate.role(Spinner).on(background=True)}
        with spawned(roles) as group:
            train, roll = group.role("train", Spinner), group.role("roll", Spinner)
            roll.spin()
            train.add(0.0)
            call = roll.spin.submit()
            with train.add.keep(1.0) as kept:
                assert float(kept.fetch()[0]) == 1.0
                assert float(train.add(1.0)[0]) == 2.0
            assert not call.done()
            assert call.result() == 0.0


class OnDevice(Trainer):
    """A trainer whose model lies on the slot's device; its log-probabilities come from a copy on the host."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.model.to(self.ctx.device)

    @method
    def step(self) -> None:
        """Change all weights."""
        change_weights(host := copy.deepcopy(self.model).cpu(), 1)
        self.model.load_state_dict(host.state_dict())

    @method
    def log_probs(self, prompts: Any, rows: Any) -> list[list[float]]:
        """Return the log-probabilities of the tokens of rows, one row for each prompt."""
        host = copy.deepcopy(self.model).cpu()
        return [log_probs(host, prompt, row) for prompt, row in zip(prompts, rows, strict=True)]


class Halved(Role):
    """A role that copies its state, on the host or on the device, and writes the copy beside its steps."""

    def __init__(self, on_host: bool, mib: int) -> None:
        self.on_host = on_host
        self.x = torch.zeros(mib << 18, device=self.ctx.device)

    @method(collect=First())
    def step(self, times: int = 1) -> float:
        """Change the state in place, as an optimizer does, without waiting for the device."""
        for _ in range(times):
            self.x.add_(1.0)
        return float(times)

    @method(collect=First())
    def value(self) -> tuple[float, float]:
        return float(self.x.min()), float(self.x.max())

    def save(self, directory: str) -> Iterator[None]:
        taken = host_copy({"x": self.x}) if self.on_host else {"x": self.x.clone()}
        assert not self.on_host or DRY or taken["x"].is_pinned()
        yield
        torch.save(taken, Path(directory, "x.pt"))

    def restore(self, directory: str) -> None:
        self.x = torch.load(Path(directory, "x.pt"), map_location=self.x.device)["x"]


class TestSaving(SavingBeside):
    """Checkpoints that are written beside the calls."""

    device: ClassVar[str] = DEVICE

    def connect(self, **more: Any) -> Runtime:
        return connect(**more)

    @pytest.mark.parametrize("on_host", [True, False])
    def test_a_state_of_a_device(self, tmp_path: Path, on_host: bool) -> None:
        """A checkpoint beside calls has the state between two steps, despite earlier and later kernels."""
        with spawned({"halved": colocate.role(Halved, on_host, 1 if DRY else 1024)}, name="halved") as group:
            halved = group.role("halved", Halved)
            for _ in range(3):
                halved.step(20)
                saving = group.checkpoint(tmp_path / "one", wait=False)
                before = halved.value()
                while not saving.done():
                    halved.step(20)
                saving.result()
                assert halved.value() > before
                group.restore(tmp_path / "one")
                assert halved.value() == before


class TestEngines:
    """The engine `transformers` beside a trainer: with a model of its own, and with the trainer's."""

    @pytest.mark.parametrize("own", [True, False], ids=["own model", "the trainer's"])
    def test_beside_a_trainer(self, own: bool) -> None:
        """An engine's log-probabilities are the trainer's after each sync, and a sleep of its cache changes no row."""
        which = {"model": LLAMA} if own else {"role": "trainer"}
        engine = colocate.role("rollout.engine", engine="transformers", **which)
        with spawned({"trainer": colocate.role(OnDevice, LLAMA), "rollout": engine}) as group:
            trainer, rollout = group.role("trainer", OnDevice), group.role("rollout")
            for version in (1, 2):
                colocate.sync_weights(trainer, rollout)
                sampling = Sampling(max_tokens=8, seed=version)
                rows = [rows[0] for rows in rollout.generate(PROMPTS, sampling=sampling)]
                assert {row.versions[0][0] for row in rows} == {version}
                (wanted,) = trainer.log_probs(PROMPTS, rows)
                for row, each in zip(rows, wanted, strict=True):
                    assert row.log_probs == pytest.approx(each, abs=1e-3)
                group.sleep("rollout", ["cache"])
                assert [rows[0] for rows in rollout.generate(PROMPTS, sampling=sampling)] == rows
                trainer.step()


class TestSharing(Sharing):
    """Groups that share slots with a GPU."""

    device: ClassVar[str] = DEVICE
    test_threads_are_divided = None  # CPUs aren't counted here

    def connect(self, **more: Any) -> Runtime:
        return connect(**more)

    def test_values_stay_on_the_gpu(self, runtime: Runtime) -> None:
        """A value passes between the processes of two groups on one GPU without a copy on the host."""
        told: list[colocate.TransferRecord] = []
        count = 1 << 20
        with runtime.reserve(1, groups=2) as pool:
            maker = pool.spawn({"maker": colocate.role(Maker)}).role("maker", Maker)
            user = pool.spawn({"user": colocate.role(User)}).role("user", User)
            observer = SimpleNamespace(colocate_call_finished=lambda record: told.extend(record.transfers))
            runtime.observe(observer)
            with maker.make.keep(count) as kept:
                assert torch.equal(user.echo(kept.ref).cpu(), torch.arange(count).float())
            runtime._node.services.flush_observers()
        assert [(each.refusal, each.lent) for each in told] == [("", 0 if DRY else 4 * count)]


class Maker(Role):
    def __init__(self) -> None:
        self.net = torch.nn.Linear(4, 4).to(self.ctx.device)
        self.taken: list[Any] = []

    @method(dispatch=Scatter("x"), collect=Concat())
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    @method(collect=Concat())
    def make(self, rows: int) -> torch.Tensor:
        # A float arange of a CPU depends on its number of threads from 2**24 on.
        self.made = torch.arange(rows, device=self.ctx.device).float()
        return self.made

    @method(collect=Concat())
    def jagged(self, rows: int) -> torch.Tensor:
        """Return rows of lengths 0, 1, 2 ..., each filled with its length."""
        lengths = torch.arange(rows, device=self.ctx.device)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return torch.nested.nested_tensor_from_jagged(lengths.repeat_interleave(lengths).double(), offsets)

    @method(collect=Gather())
    def pointer(self) -> int:
        return self.made.data_ptr()

    @method(collect=Concat())
    def chain(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        """Start work that the GPU is still busy with when the method has returned."""
        for _ in range(steps):
            x = torch.tanh(x @ x)
        return x

    @method(collect=Gather())
    def draw(self) -> list[float]:
        drawn = torch.randn(3, generator=self.ctx.generator, device=self.ctx.device)
        return [float(x) for x in drawn]

    @method(collect=Gather())
    def reduced(self, value: float) -> tuple[str, float]:
        group = self.ctx.process_group()
        x = torch.full((2,), value, device=self.ctx.device)
        torch.distributed.all_reduce(x, group=group)
        return torch.distributed.get_backend(group), float(x[0])

    @method
    def device(self) -> tuple[str, int]:
        return str(self.ctx.device), torch.cuda.device_count()

    @method
    def take(self, gib: float) -> int:
        """Take so much of the GPU's memory; return the pid."""
        self.taken.append(torch.empty(int(gib * 2**30), dtype=torch.uint8, device=self.ctx.device))
        return os.getpid()

    @method
    def uuid(self) -> str:
        return str(torch.cuda.get_device_properties(0).uuid)


class User(Role):
    @method(dispatch=Broadcast(), collect=Gather())
    def seen(self, x: torch.Tensor) -> tuple[int, str]:
        return x.data_ptr(), str(x.device)

    @method
    def places(self, x: Any, some: Any = None) -> list[str]:
        return [str(item.device) for item in (x, some) if item is not None]

    @method(dispatch=Scatter("x", "lengths"), collect=Concat(), host=("lengths",))
    def packed(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Call a function of torch that takes lengths only on the host."""
        assert x.device == self.ctx.device
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        padded, _ = torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return padded

    @method(collect=Gather())
    def total(self, x: torch.Tensor) -> float:
        return float(x.double().sum())

    @method(dispatch=Broadcast(), collect=First())
    def echo(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @method(dispatch=Scatter("x"), collect=Gather())
    def rows(self, x: torch.Tensor) -> list[list[float]]:
        return [row.tolist() for row in x.unbind()]

    @method(collect=Gather())
    def applied(self, net: torch.nn.Module) -> float:
        with torch.no_grad():
            return float(net(torch.ones(1, 4, device=self.ctx.device)).sum())


@pytest.fixture(params=["processes", "threads"])
def group(request: pytest.FixtureRequest) -> Iterator[ColocatedGroup]:
    with connect(threads=request.param == "threads") as runtime:
        yield runtime.reserve().spawn({"maker": colocate.role(Maker), "user": colocate.role(User)}, name="gpu")


@pytest.fixture
def processes() -> Iterator[ColocatedGroup]:
    with connect() as runtime:
        yield runtime.reserve().spawn({"maker": colocate.role(Maker), "user": colocate.role(User)}, name="gpu")


class TestDevices:
    @needs_cuda
    def test_slot_sees_one_device(self, processes: ColocatedGroup) -> None:
        assert processes.role("maker", Maker).device() == [("cuda:0", 1)]

    def test_resident_is_shared_within_slot(self, processes: ColocatedGroup) -> None:
        """A resident is the same memory for two roles of a slot, and arrives on the driver's CPU."""
        maker, user = processes.role("maker", Maker), processes.role("user", User)
        kept = maker.make.keep(8)
        assert user.seen(kept.ref) == [(maker.pointer()[0], DEVICE)]
        fetched = kept.fetch()
        assert fetched.is_cpu
        assert torch.equal(fetched, torch.arange(8.0))

    def test_gpu_and_host_digests_match(self) -> None:
        """Digests of tensors, also of converted ones, are equal on a GPU and on the host."""
        from colocate.features.weights.digests import TensorDigests

        generator = torch.Generator().manual_seed(0)
        for size in (1, 7, 1000, (1 << 23) + 5):  # The last size takes several rounds.
            numbers = torch.randn(size, generator=generator)
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
                found = TensorDigests("one")
                found.add_tensor("host", numbers.to(dtype))
                found.add_tensor("host, converted", numbers, dtype)
                found.add_tensor("device", numbers.to(dtype).to(DEVICE))
                found.add_tensor("device, converted", numbers.to(DEVICE), dtype)
                told = found.collect_digests()
                assert told["device"].content == told["host"].content
                assert told["device, converted"].content == told["host, converted"].content

    def test_arguments_arrive_on_slot_device(self, group: ColocatedGroup) -> None:
        """Arguments arrive on the slot's device, by value, by `.ref`, and after a fetch."""
        maker, user = group.role("maker", Maker), group.role("user", User)
        out = maker.forward(torch.ones(6, 4))
        assert out.shape == (6, 4)
        assert not out.requires_grad
        with maker.forward.keep(torch.ones(6, 4)) as kept:
            for x in (torch.ones(2), out, kept.ref, kept.fetch()):
                assert user.places(x, torch.ones(1)) == [[DEVICE, DEVICE]]

    def test_some_stay_on_the_host(self, group: ColocatedGroup) -> None:
        """Arguments named in `host=` stay on the host, where torch needs them."""
        x, lengths = torch.rand(3, 5, 2), torch.tensor([5, 2, 1])
        out = group.role("user", User).packed(x, lengths).cpu()
        for row, length in enumerate(lengths):
            assert torch.equal(out[row, :length], x[row, :length])
            assert not out[row, length:].any()

    def test_collections_and_modules(self, group: ColocatedGroup) -> None:
        """Collections and modules arrive on the device, and the driver's own module stays on the CPU."""
        user = group.role("user", User)
        net = torch.nn.Linear(4, 1)
        with torch.no_grad():
            expected = float(net(torch.ones(1, 4)).sum())
        assert user.applied(net)[0] == pytest.approx(expected, abs=1e-3)
        assert next(net.parameters()).is_cpu
        tensordict = pytest.importorskip("tensordict")
        table = tensordict.TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2)}}, [2])
        assert user.places(table["a"], table["b"]["c"]) == [[DEVICE, DEVICE]]
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        assert user.places(ragged) == [[DEVICE]]

    def test_processes_and_threads_on_one_gpu(self) -> None:
        """Processes and threads use one GPU at the same time, and values pass through the driver."""
        with connect() as one, connect(threads=True) as other:
            groups = [runtime.reserve().spawn({"maker": colocate.role(Maker)}) for runtime in (one, other)]
            makers = [group.role("maker", Maker) for group in groups]
            x = torch.eye(64) * 0.5
            calls = [maker.chain.submit(x, 20) for maker in makers]
            first, second = (call.result().cpu() for call in calls)
            assert torch.allclose(first, second)
            assert torch.allclose(makers[1].chain(makers[0].chain(x, 1), 1).cpu(), makers[0].chain(x, 2).cpu())

    def test_forks_of_a_template_that_has_torch(self) -> None:
        """Forks of a template with torch use the GPU, in turn and two at a time; the template never opens it."""
        x = torch.eye(64) * 0.5
        with connect() as runtime:
            for slots in (1, 1, 2):
                with runtime.reserve(slots) as pool, pool.spawn({"maker": colocate.role(Maker)}) as group:
                    made = group.role("maker", Maker).chain(x, 1).cpu()
                    assert torch.allclose(made, torch.tanh(x @ x).repeat(slots, 1))
                    pids = [row.pid for row in group._node.workforce.workers]
                    template = forks._forks.current and forks._forks.current.pid
                    assert template is not None
                    assert {_begin_of_code(pid) for pid in pids} == {_begin_of_code(template)}
        with open(f"/proc/{template}/maps") as maps:
            mapped = maps.read()
        assert "libtorch" in mapped
        assert "/dev/nvidia" not in mapped


def _begin_of_code(pid: int) -> str:
    """Return the address of a process's code: equal in a fork, different in another process."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[23]


class TestChoice:
    @needs_cuda
    def test_count(self) -> None:
        """The number of GPUs that is counted without CUDA is CUDA's number."""
        code = "import torch; print(torch.cuda.device_count())"
        assert gpus.count_gpus() == int(subprocess.check_output([sys.executable, "-c", code], text=True).split()[-1])

    @needs_cuda
    @pytest.mark.parametrize("by", ["number", "uuid"])
    def test_a_job_with_one_gpu(self, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
        """A job whose one GPU is given by number or UUID has a slot with that GPU."""
        uuids = gpus.machine_gpus()
        if by == "uuid" and not all(uuids):
            pytest.skip("NVML tells no UUIDs here")
        monkeypatch.setenv(gpus.VARIABLE, uuids[-1] if by == "uuid" else str(len(uuids) - 1))
        with colocate.connect("local", processes=True) as runtime:
            assert [node.gpus for node in runtime._node.services.executor.nodes()] == [1]
            maker = runtime.reserve(gpus=1).spawn({"maker": colocate.role(Maker)}).role("maker", Maker)
            assert maker.device() == [("cuda:0", 1)]
            if all(uuids):
                assert uuids[-1].removeprefix("GPU-").startswith(str(maker.uuid()[0]).removeprefix("GPU-")[:8])

    def test_a_job_without_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(gpus.VARIABLE, "-1")
        with colocate.connect("local", processes=True) as runtime, pytest.raises(PlacementError, match="can never fit"):
            runtime.reserve(gpus=1)

    @pytest.mark.parametrize("engine", ["ray", "dask"])
    def test_engines(self, engine: str) -> None:
        """A private Ray and a private Dask give a slot the GPU."""
        pytest.importorskip({"ray": "ray", "dask": "distributed"}[engine])
        with colocate.connect(engine) as runtime, runtime.reserve(gpus=0 if DRY else 1, cpus=1) as pool:
            maker = pool.spawn({"maker": colocate.role(Maker), "user": colocate.role(User)}).role("maker", Maker)
            assert maker.device() == [(DEVICE, 0 if DRY else 1)]
            assert torch.equal(maker.make(3), torch.arange(3.0))


class Sharded(Renewing):
    """A model whose process groups are cut and made again, as after a failure of another rank."""

    @method
    def cut(self) -> tuple[str, list[str]]:
        """Cut the groups and renew the model; return the default group's backends, and the groups held then."""
        backends = str(dist.get_backend_config())
        groups: Any = self.ctx._groups()
        groups.drop(["sharded/default"])
        self.renew()
        return backends, groups.holders()

    @method
    def bound(self) -> str:
        return str(dist.group.WORLD.bound_device_id)  # type: ignore[union-attr]


class TestTrainers:
    """Models that ranks share; here there is one rank."""

    @pytest.mark.parametrize("kind", ["ddp", "ddp in the default group", "fsdp2", "tp"])
    def test_a_model_goes_on_with_new_groups(self, kind: Kind) -> None:
        """A model whose process groups are cut and made again trains like a plain script."""
        role = colocate.role(Sharded, kind).on(default_group=True)
        with spawned({"sharded": role}, name="sharded") as group:
            sharded = group.role("sharded", Sharded)
            assert DRY or kind != "ddp" or sharded.bound() == [DEVICE]
            losses = [sharded.step(number)[0] for number in range(2)]
            (found,) = sharded.cut()
            assert found == ("cpu:gloo,cuda:gloo" if DRY else "cpu:gloo,cuda:nccl", [])
            losses += [sharded.step(number)[0] for number in range(2, 4)]
            assert losses == pytest.approx(train_alone()[0], rel=1e-3)

    @pytest.mark.parametrize("kind", ["ddp", "ddp in the default group", "fsdp2", "tp"])
    @pytest.mark.parametrize("where", ["forward", "backward", "after"])
    def test_a_failed_step_is_done_again(self, kind: Kind, where: Where) -> None:
        """A step that has failed in its middle is repeated, and the losses are a plain script's."""
        with spawned({"trainer": colocate.role(Renewing, kind).on(default_group=True)}) as group:
            trainer = group.role("trainer", Renewing)
            losses = trainer.step(0)
            with pytest.raises(RoleError, match="Failure"):
                trainer.step(1, 0, where)
            losses += [trainer.step(number)[0] for number in range(1, 4)]
            assert losses == pytest.approx(train_alone()[0], rel=1e-3)


def fingerprint(*tensors: Any) -> str:
    """Return a number that depends on each word of tensors and its place, computed on their device.

    To hash gigabytes on the host takes minutes.
    """
    total = 0
    for tensor in tensors:
        for words in torch.as_tensor(tensor).detach().reshape(-1).view(torch.int32).split(1 << 22):
            places = 2 * torch.arange(words.numel(), device=words.device) + 1
            total = (total * 31 + int((words * places).sum())) % 2**64
    return f"{total:x}"


def pinned_speed(nbytes: int) -> float:
    """Return the bytes per second between the device and pinned memory, there and back."""
    here = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * nbytes / sorted(seconds)[2]


class Sleeper(Dozing):
    """A sleeper that can also fill the rest of the GPU."""

    @method
    def digest(self) -> tuple[str, str]:
        rest = [self.net.weight.grad, *self.cache, self.net.get_buffer("scale")]
        rest += [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return self._weights(), fingerprint(*(each for each in rest if each is not None))

    def _weights(self) -> str:
        return fingerprint(self.net.weight, self.tied.weight, *self.views.values())

    @method(awake=())
    def fill(self, gib: float) -> None:
        """Take so much of the GPU; 0 to free all."""
        self._filling = torch.empty(int(gib * 2**30), dtype=torch.uint8, device=self.ctx.device) if gib else None
        self._hidden = lambda: self._filling  # The search for tensors can't see this.

    @method(awake=())
    def used(self) -> tuple[int, int]:
        """Return the bytes that torch has reserved in this process, and the bytes in use on the GPU."""
        free, total = torch.cuda.mem_get_info(self.ctx.device)
        return torch.cuda.memory_reserved(self.ctx.device), total - free

    @method(awake=())
    def copy_speed(self, mib: int) -> float:
        """Return `pinned_speed` in the worker."""
        return pinned_speed(mib * 2**20)


class Computing(Sleeper):
    """A sleeper that computes for longer than its memory takes to move."""

    @method
    def compute(self, rounds: int) -> str:
        """Compute some rounds, each to its end, as a loop that draws tokens does; then train a step."""
        x = torch.eye(64 if DRY else 4096, device=self.ctx.device)
        for _ in range(rounds):
            x = x @ x
            assert float(x[0, 0]) == 1
        return self._train()


STEP = ["one", "two", "one", "three"]


@contextlib.contextmanager
def in_turns(role: Any, mib: int, name: str, budget: str | None) -> Iterator[ColocatedGroup]:
    """Spawn three roles that take turns within a budget, or without turns for None."""
    more: Any = {} if budget is None else {"residency": "swap", "device_memory": budget, "step": STEP}
    with connect() as runtime:
        roles = {each: colocate.role(role, mib) for each in ("one", "two", "three")}
        yield runtime.reserve().spawn(roles, name=name, **more)


class Kernels(Role):
    """A role that launches kernels without waiting for the device."""

    def __init__(self) -> None:
        self.x = torch.ones(2048, 2048, device=self.ctx.device)
        self.ranges: list[str | None] = []
        self.ctx.process_group()

    @method
    def spin(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)

    @method
    def multiply(self, times: int) -> None:
        for _ in range(times):
            self.x = (self.x @ self.x).clamp_(0, 1)

    @method
    def reduce(self) -> None:
        torch.distributed.all_reduce(self.x, group=self.ctx.process_group())

    @method
    def list_ranges(self) -> list[str | None]:
        """Return the NVTX ranges that have begun here since the last call, with a None for each end."""
        nvtx, (found, self.ranges) = torch.cuda.nvtx, (self.ranges, [])
        nvtx.range_push = lambda name: self.ranges.append(name)
        nvtx.range_pop = lambda: self.ranges.append(None)
        return found


class TestProfiles(Profiling):
    """The suite of profiles with a GPU, and tests that only kernels allow."""

    device: ClassVar[str] = DEVICE
    test_invalid_profile_arguments_are_refused = None  # On a GPU memory can be profiled.

    def connect(self, **more: Any) -> Runtime:
        return connect(**more)

    @needs_cuda
    def test_kernels_count_for_own_call(self) -> None:
        """Kernels that run on after their method has returned count for their own call, in place and in time."""
        with spawned({"kernels": colocate.role(Kernels)}, name="gpu") as group:
            kernels = group.role("kernels", Kernels)
            kernels.multiply(3)
            kernels.reduce()
            began = time.perf_counter()
            kernels.spin(100_000_000)
            took = time.perf_counter() - began
            with colocate.profile(group, memory=True) as profile:
                kernels.spin(100_000_000)
                kernels.multiply(20)
                kernels.reduce()
        found = json.loads(profile.trace.read_text())
        spans = {each["name"]: each for each in found if each["ph"] == "X" and each.get("cat") == "kernels"}
        ran = [each for each in found if each["ph"] == "X" and each.get("cat") == "kernel"]

        def within(name: str) -> list[Any]:
            start, end = spans[name]["ts"] - 1000, spans[name]["ts"] + spans[name]["dur"] + 1000
            return [each for each in ran if start <= each["ts"] and each["ts"] + each["dur"] <= end]

        (spin,) = within("kernels.spin")
        assert spin["dur"] / 1e6 == pytest.approx(took, rel=0.5)
        assert len(within("kernels.multiply")) >= 40
        assert len(ran) == sum(len(within(name)) for name in spans)
        assert {each["tid"] for each in ran}.isdisjoint({each["tid"] for each in spans.values()})
        assert profile.parts["kernels.spin"].seconds["compute"] >= 0.9 * spin["dur"] / 1e6
        (snapshot,) = profile.snapshots
        with snapshot.open("rb") as file:
            assert any(pickle.load(file)["device_traces"])  # This file is a worker's of this test.

    @needs_cuda
    def test_ranges_of_nvtx(self) -> None:
        """Each profiled call has an NVTX range that ends with the call, and other calls have none."""
        with spawned({"kernels": colocate.role(Kernels)}, name="gpu") as group:
            kernels = group.role("kernels", Kernels)
            kernels.list_ranges()
            kernels.multiply(1)
            with colocate.profile(group):
                kernels.multiply(1)
                kernels.spin(1)
            kernels.multiply(1)
            assert kernels.list_ranges() == [
                ["kernels.multiply", None, "kernels.spin", None, "the profile's end", None]
            ]


class TestTurns:
    def test_roles_take_turns(self) -> None:
        """Roles that take turns within a budget compute the same as without one."""
        names = ("one", "two", "three")
        roles = {name: colocate.role(Dozing, 8) for name in names}
        with spawned(roles, name="turns", residency="swap", device_memory="72MiB") as turns:
            free = {}
            for name in [*names, "two"] * 4:
                free.setdefault(name, []).append(turns.role(name, Dozing).train())
                (slot,) = turns.memory().slots
                assert sum(sum(role.device.values()) for role in slot.roles) <= 72 * 2**20
            assert sum(role.asleep for role in slot.roles) >= 24 * 2**20
            turns.close()
        with spawned({name: colocate.role(Dozing, 8) for name in names}, name="free") as group:
            for name, digests in free.items():
                assert [group.role(name, Dozing).train() for _ in digests] == digests

    @needs_cuda
    def test_a_budget_beside_the_allocator(self) -> None:
        """Torch has allocated no more than the budget, up to 2 %, while roles take turns."""
        roles = {name: colocate.role(Sleeper, 256) for name in ("one", "two", "three")}
        with spawned(roles, residency="swap", device_memory="2304MiB") as turns:
            for name in ("one", "two", "three") * 3:
                turns.role(name, Sleeper).train()
                (slot,) = turns.memory().slots
                assert slot.gpu is not None
                assert slot.gpu["allocated"] <= 1.02 * 2304 * 2**20

    @pytest.mark.alone
    def test_steps_with_turns(self, record_property: Any) -> None:
        """Steps with turns give the same results; the additional time is recorded."""
        mib, rounds, steps = (8, 1, 4) if DRY else (512, 100, 6)
        seconds, digests = {}, {}
        for name, budget in (("free", None), ("turns", f"{9 * mib}MiB")):
            with in_turns(Computing, mib, name, budget) as group:
                took: list[float] = []
                for _ in range(steps):
                    began = time.perf_counter()
                    digests[name] = [group.role(each, Computing).compute(rounds) for each in STEP]
                    took.append(time.perf_counter() - began)
                seconds[name] = sum(took[3:])
        assert digests["turns"] == digests["free"]
        if not DRY:
            record_property(
                "a step whose roles take turns, beside one without", f"{seconds['turns'] / seconds['free']:.2f} x"
            )

    @needs_cuda
    @pytest.mark.alone
    def test_roles_of_which_two_do_not_fit(self) -> None:
        """Two roles with more than half of the GPU each take turns, and both keep their memory's contents."""
        _, total = torch.cuda.mem_get_info(DEVICE)
        mib = int(0.28 * total / 2**20)  # A role has weights, and a cache as large.
        roles = {name: colocate.role(Sleeper, mib) for name in ("one", "two")}
        budget = f"{int(0.7 * total / 2**20)}MiB"
        with spawned(roles, residency="swap", device_memory=budget) as group:
            one, two = (group.role(name, Sleeper) for name in roles)
            before = one.digest(), two.digest()
            assert (one.digest(), two.digest()) == before

    def test_role_beyond_budget_fails(self) -> None:
        """A role beyond its budget fails with an error that lists its memory, and calls succeed after a sleep."""
        with spawned({"one": colocate.role(Dozing, 8).on(device_memory="24MiB")}) as group:
            with pytest.raises(colocate.MemoryBudgetError, match=r"one 32 MiB \(parameters 8 MiB, gradients 8 MiB"):
                group.role("one", Dozing).train()
            group.sleep("one", ("optimizer", "grads"))
            assert group.role("one", Dozing).look()


def record_naps(record_property: Any, group: ColocatedGroup, what: str, size: int, first: float) -> None:
    """Record the speed of five sleeps and wakes of a `Sleeper`, and the seconds of its first sleep."""
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        group.sleep("actor")
        group.wake("actor")
        seconds.append(time.perf_counter() - begin)
    (speed,) = group.role("actor", Sleeper).copy_speed(1024)
    median = sorted(seconds)[2]
    record_property(what, f"{2 * size / median / 1e9:.1f} GB/s")
    record_property(f"{what}, beside pinned copies", f"{2 * size / median / speed:.2f} x")
    slowest = f"{first:.1f} s, {max(seconds):.2f} s"
    record_property(f"{what}: the first sleep, which pins memory; the slowest of both later", slowest)


class TestSleep:
    def test_sleep_and_wake(self) -> None:
        """A sleep and a wake restore all memory, and training continues as without a sleep."""
        roles = {name: colocate.role(Dozing, 8) for name in ("actor", "other")}
        with spawned(roles, name="sleepy") as group:
            actor, other = group.role("actor", Dozing), group.role("other", Dozing)
            for tags in (None, ("weights",), ("optimizer", "grads"), ("cache",)):
                before, objects = actor.digest(), actor.objects()
                gone = group.sleep("actor", tags)
                assert gone > 0 or actor.digest() == before  # There may be no gradients yet.
                assert group.memory().slots[0].roles[0].asleep >= gone * 0.98
                group.wake("actor", tags)
                assert (actor.digest(), actor.objects()) == (before, objects)
                group.sleep("actor", tags)
                assert actor.train() == other.train()

    def test_a_graph_and_hooks(self) -> None:
        """A sleep keeps a loss's graph with its saved weights, and hooks of modules, tensors and optimizers."""
        with connect() as runtime:
            SleepingAmidSteps().test_a_graph_and_hooks(runtime.reserve().spawn)

    def test_discard(self) -> None:
        """Discarded memory comes back as zeros, asleep before or not, and other memory is unchanged."""
        with spawned({"actor": colocate.role(Dozing, 8)}, name="forgetful") as group:
            actor = group.role("actor", Dozing)
            for slept in (False, True):
                actor.train()
                (before,), objects = actor.parts(), actor.objects()
                if slept:
                    group.sleep("actor", ["grads"])
                assert group.sleep("actor", discard=["grads", "cache"])
                kept = {tag: before[tag] for tag in ("weights", "optimizer")}
                assert (actor.parts(), actor.objects()) == ([kept], objects)

    @needs_cuda
    @pytest.mark.alone
    @pytest.mark.parametrize("mib", [1024, 3584])
    def test_memory_is_given_back(self, record_property: Any, mib: int) -> None:
        """A sleep gives at least 98 % of a role's bytes back to the GPU."""
        with spawned({"actor": colocate.role(Sleeper, mib)}) as group:
            actor = group.role("actor", Sleeper)
            actor.train()
            before, (awake,), (slot,) = actor.digest(), actor.used(), group.memory().slots
            size = slot.roles[0].total
            assert slot.gpu is not None
            what = f"beside {size / 2**30:.0f} GiB of a role"
            kept, unexplained = (slot.unowned[part] for part in ("fragmentation", "other, device"))
            record_property(f"{what}: what torch keeps for the next", f"{kept / 2**20:.0f} MiB")
            record_property(f"{what}: unexplained", f"{unexplained / slot.gpu['reserved']:.1%}")
            assert 0 <= unexplained <= 0.02 * slot.gpu["reserved"]
            begin = time.perf_counter()
            assert group.sleep("actor") >= 0.98 * size
            first = time.perf_counter() - begin
            (asleep,) = actor.used()
            group.wake("actor")
            assert awake[1] - asleep[1] >= 0.98 * size, (awake, asleep, size)
            assert actor.digest() == before
            record_naps(record_property, group, f"sleep and wake of {size / 2**30:.0f} GiB", size, first)
            assert actor.digest() == before

    @needs_cuda
    @pytest.mark.alone
    def test_wake_without_room(self) -> None:
        """A wake without room fails, however often, and the role wakes once there is room."""
        with spawned({"actor": colocate.role(Sleeper, 1024), "other": colocate.role(Sleeper, 1)}) as group:
            actor, other = group.role("actor", Sleeper), group.role("other", Sleeper)
            before = actor.digest()
            group.sleep("actor")
            free = torch.cuda.mem_get_info(DEVICE)[0]
            other.fill(free / 2**30 - 1)
            for _ in range(3):
                with pytest.raises(colocate.MemoryBudgetError, match=r"are needed on cuda:0"):
                    group.wake("actor")
            with pytest.raises(colocate.SleepingError, match="could not be woken"):
                actor.digest()
            other.fill(0)
            assert actor.digest() == before


class Spoiler(Role):
    """A role that spoils its device, allocates much at once, and captures graphs."""

    def __init__(self) -> None:
        torch.zeros(1, device=self.ctx.device)
        self.graph: Any = None

    @method
    def spoil(self) -> str:
        """Read beyond the end of a tensor, which the device finds after the return."""
        self.read = torch.zeros(1, device=self.ctx.device)[torch.tensor([5], device=self.ctx.device)]
        return "begun"

    @method
    def fill(self, mib: int) -> int:
        return torch.ones(mib * 2**20, dtype=torch.uint8, device=self.ctx.device).numel()

    @method
    def replay(self, value: float) -> torch.Tensor:
        """Run a graph, whose output is always in the same place."""
        if self.graph is None:
            self.x = torch.zeros(1024, device=self.ctx.device)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.y = self.x * 2
        self.x.fill_(value)
        self.graph.replay()
        return self.y

    @method
    def capture_until(self, path: str) -> float:
        """Capture a graph in torch's default mode, from the creation of `path`.begun until `path` exists."""
        x = torch.ones(1024, device=self.ctx.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            Path(f"{path}.begun").touch()
            wait_until(Path(path).exists, "the graph may end")
            y = y * 2
        x.fill_(3)
        graph.replay()
        return float(y.sum()) / 1024

    @method
    def begin(self) -> None:
        """Keep the device busy for half a second, without waiting."""
        torch.cuda._sleep(10**9)

    @method
    def is_idle(self) -> bool:
        """Return whether the current stream has nothing left to do."""
        return torch.cuda.current_stream().query()

    @method
    def stream(self) -> int:
        """Return the current stream, and set another one."""
        found = torch.cuda.current_stream().stream_id
        torch.cuda.set_stream(torch.cuda.Stream())
        return found

    @method(collect=First())
    def late(self, value: float) -> torch.Tensor:
        """Return a tensor whose values are written after the device has been busy for a while."""
        made = torch.zeros(2**20, device=self.ctx.device)
        torch.cuda._sleep(10**6)
        return made.fill_(value)

    @method(collect=Concat())
    def rows(self, count: int, value: float) -> torch.Tensor:
        return torch.full((count,), value, device=self.ctx.device)

    @method
    def is_all(self, tensor: torch.Tensor, value: float) -> bool:
        """Return whether a tensor has only this value on this role's stream, with a delay before the answer."""
        found = (tensor * 2 == 2 * value).all()
        torch.cuda._sleep(10**5)
        return bool(found)


class OnASide(Spoiler):
    def __init__(self) -> None:
        super().__init__()
        torch.cuda.set_stream(torch.cuda.Stream())


class TestErrors:
    @needs_cuda
    def test_a_lost_context(self) -> None:
        """A call that spoils the CUDA context fails, and so does its group; another group still works."""
        with connect() as runtime:
            roles = {"spoiler": colocate.role(Spoiler), "maker": colocate.role(Maker)}
            other = runtime.reserve().spawn({"maker": colocate.role(Maker)}, name="other")
            group = runtime.reserve().spawn(roles, name="spoiled")
            spoiler, maker = group.role("spoiler", Spoiler), group.role("maker", Maker)
            with group.pipeline():
                spoiled, after = spoiler.spoil.submit(), maker.make.submit(3)
            error = spoiled.exception()
            assert isinstance(error, RoleError)
            assert (error.role, error.method) == ("spoiler", "spoil")
            assert "device-side assert" in str(error)
            assert isinstance(after.exception(), WorkerDied)
            with pytest.raises(WorkerDied, match="can't use cuda:0 any more"):
                maker.make(3)
            assert torch.equal(other.role("maker", Maker).make(3).cpu(), torch.arange(3.0))

    @needs_cuda
    def test_group_restarts_after_device_assert(self) -> None:
        roles = {"spoiler": colocate.role(Spoiler)}
        with spawned(roles, name="spoiled", on_failure="restart") as group:
            spoiler = group.role("spoiler", Spoiler)
            with pytest.raises(RoleError, match="device-side assert"):
                spoiler.spoil()
            group.wait_ready()
            assert spoiler.fill(1) == [2**20]

    @needs_cuda
    def test_peaks(self) -> None:
        """The memory report has the peak of each method, beside the bytes that the role holds."""
        with spawned({"spoiler": colocate.role(Spoiler)}) as group:
            group.role("spoiler", Spoiler).fill(256)
            group.role("spoiler", Spoiler).fill(64)
            (role,) = group.memory().slots[0].roles
            assert role.activations is not None
            assert 256 * 2**20 <= role.activations["fill"] <= 258 * 2**20
            assert role.total < 2**20

    @needs_cuda
    def test_outputs_of_graphs(self) -> None:
        """A replay of a graph doesn't change outputs that were returned before."""
        with spawned({"spoiler": colocate.role(Spoiler)}) as group:
            spoiler = group.role("spoiler", Spoiler)
            kept = [spoiler.replay.keep(float(value)) for value in range(4)]
            for value, each in enumerate(kept):
                assert torch.equal(each.fetch()[0].cpu(), torch.full((1024,), 2.0 * value))

    @needs_cuda
    def test_graph_is_captured_beside_other_processes(self, tmp_path: Path) -> None:
        """A graph is captured while the driver and another process fetch results, and memory is reported."""
        with connect() as runtime:
            roles = {"spoiler": colocate.role(Spoiler), "maker": colocate.role(Maker)}
            group = runtime.reserve().spawn(roles, name="captures")
            other = runtime.reserve().spawn({"spoiler": colocate.role(Spoiler)}, name="other")
            made = [group.role("maker", Maker).make.keep(2**20) for _ in range(3)]
            small = group.role("maker", Maker).make.keep(16)
            for number in range(3):
                path = tmp_path / str(number)
                captured = group.role("spoiler", Spoiler).capture_until.submit(str(path))
                wait_until(Path(f"{path}.begun").exists, "a graph is captured")
                assert torch.equal(made[number].fetch()[0].cpu(), torch.arange(2.0**20))
                assert other.role("spoiler", Spoiler).is_all(small.ref, 1.0) == [False]
                assert group.memory().slots[0].gpu is not None
                path.touch()
                assert captured.result(60) == [12.0]

    @needs_cuda
    def test_streams(self) -> None:
        """Calls run on the constructor's stream and wait for its end; a stream that a method sets is dropped."""
        roles = {"side": colocate.role(OnASide), "one": colocate.role(Spoiler), "other": colocate.role(Spoiler)}
        with spawned(roles) as group:
            for name in roles:
                role = group.role(name, Spoiler)
                role.begin()
                assert role.is_idle() == [True]
            found = {name: {group.role(name, Spoiler).stream()[0] for _ in range(3)} for name in roles}
            assert found["one"] == found["other"]
            assert len(found["one"]) == len(found["side"]) == 1
            assert found["one"] != found["side"]

    @needs_cuda
    @pytest.mark.parametrize("threads", [False, True])
    def test_residents_between_streams(self, threads: bool) -> None:
        """A resident is complete for a role on another stream, two hundred times, also in reused memory."""
        roles = {"side": colocate.role(OnASide), "one": colocate.role(Spoiler)}
        with spawned(roles, threads=threads) as group:
            side, one = group.role("side", Spoiler), group.role("one", Spoiler)
            seen = []
            for number in range(100):
                for maker, user in ((side, one), (one, side)):
                    with maker.late.keep(float(number)) as made:
                        seen.append(user.is_all.submit(made.ref, float(number)))
            assert [call.result(60) for call in seen] == [[True]] * 200

    @needs_cuda
    def test_rows_that_are_joined_for_a_stream(self) -> None:
        """Rows of several ranks that are joined on the usual stream are complete for a role with its own stream."""
        with connect() as runtime:
            group = runtime.reserve(2).spawn({"side": colocate.role(OnASide), "one": colocate.role(Spoiler)})
            side, one = group.role("side", Spoiler), group.role("one", Spoiler)
            for number in range(10):
                with one.rows.keep(2**26, float(number)) as made:
                    assert side.is_all(made.ref, float(number)) == [True, True]


class TestPpo:
    @pytest.mark.parametrize("parallel", ["none", "ddp", "fsdp2"])
    def test_an_update_is_that_of_a_cpu(self, parallel: str, tmp_path: Path) -> None:
        """An update's losses are the CPU's, and a checkpoint restores its weights."""
        # These tasks import packages that need a compiler.
        pytest.importorskip("reasoning_gym", exc_type=ImportError)
        from tests.ppo.test_parallel import SMALL, learn

        from colocate_ppo.actor import Actor
        from colocate_ppo.critic import Critic
        from colocate_ppo.reference import Reference
        from colocate_ppo.reward import Reward
        from colocate_ppo.task import Task
        from colocate_ppo.team import Team

        problems = Task(options={"min_word_len": 3, "max_word_len": 4}).draw(12)
        with connect() as runtime:
            roles: dict[str, colocate.RoleSpec[Any]] = {
                "actor": colocate.role(Actor, **SMALL, parallel=parallel),
                "critic": colocate.role(Critic, parallel=parallel),
                "reference": colocate.role(Reference),
                "reward": colocate.role(Reward),
            }
            group = runtime.reserve().spawn(roles, name="policy")
            team = Team.from_group(group)
            alone = Team(Actor(**SMALL), Critic(), Reference(), Reward(), team.scope)
            weights = alone.actor.weights()
            found, expected = (learn(each, problems, weights, 4) for each in (team, alone))
            assert found.losses == pytest.approx(expected.losses, rel=5e-3, abs=1e-4)
            group.checkpoint(tmp_path / "policy")
            team.actor.load(weights)
            group.restore(tmp_path / "policy")
            again = team.actor.weights()["state"]
            assert all(torch.equal(value.cpu(), found.actor["state"][name].cpu()) for name, value in again.items())


class TestLending:
    """A kept result from one worker's GPU to another worker's, which may be the same GPU."""

    @staticmethod
    def read(count: int, turns: int, env: dict[str, str] | None = None) -> list[colocate.TransferRecord]:
        """Return the transfers of so many results of this size, all of which must arrive unchanged."""
        told: list[colocate.TransferRecord] = []
        with connect() as runtime:
            pool = runtime.reserve(2, env=env)
            roles = {"maker": colocate.role(Maker).on(slots=[0]), "user": colocate.role(User).on(slots=[1])}
            group = pool.spawn(roles, name="lending")
            maker, user = group.role("maker", Maker), group.role("user", User)
            observer = SimpleNamespace(colocate_call_finished=lambda record: told.extend(record.transfers))
            runtime.observe(observer)
            for turn in range(turns):
                with maker.make.keep(count + turn) as kept:
                    assert torch.equal(user.echo(kept.ref).cpu(), torch.arange(count + turn).float())
            runtime._node.services.flush_observers()
        return told

    @pytest.mark.alone
    def test_from_gpu_to_gpu(self, record_property: Any) -> None:
        """A kept result is lent from GPU to GPU without passing through the host."""
        count = 1 << 16 if DRY else 1 << 26
        told = self.read(count, 5)
        assert [each.refusal for each in told] == [""] * 5
        assert [each.lent for each in told] == [0 if DRY else 4 * (count + turn) for turn in range(5)]
        last = told[-1]
        speed = f"{last.nbytes / (last.end - last.start) / 1e9:.1f} GB/s"
        record_property("256 MiB from one process's GPU memory to another one's", speed)

    def test_two_hundred(self) -> None:
        """Two hundred results arrive unchanged in reused memory."""
        assert len(self.read(1 << 18, 5 if DRY else 200)) == (5 if DRY else 200)

    def test_jagged_rows_beside_work(self) -> None:
        """Jagged rows arrive whole, also while the GPU runs other work of their maker."""
        count, steps = 64, 3 if DRY else 100
        with connect() as runtime:
            roles = {"maker": colocate.role(Maker).on(slots=[0]), "user": colocate.role(User).on(slots=[1, 2])}
            group = runtime.reserve(3).spawn(roles)
            maker, user = group.role("maker", Maker), group.role("user", User)
            x = torch.full((16, 16) if DRY else (4096, 4096), 1e-3)
            for _ in range(3 if DRY else 20):
                with maker.jagged.keep(count) as kept:
                    kept.wait()
                    work = maker.chain.submit(x, steps)
                    lower, upper = user.rows(kept.ref)
                    work.result()
                assert lower + upper == [[float(length)] * length for length in range(count)]

    @needs_cuda
    @pytest.mark.alone
    def test_an_allocator_that_maps_pieces(self, record_property: Any) -> None:
        """Memory that can't be lent passes through the host, and only the first transfer says why."""
        told = self.read(1 << 26, 3, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
        assert [each.lent for each in told] == [0, 0, 0]
        assert [bool(each.refusal) for each in told] == [True, False, False]
        last = told[-1]
        record_property("the same by the host", f"{last.nbytes / (last.end - last.start) / 1e9:.1f} GB/s")


class TestWork:
    def test_random_numbers_follow_from_the_seed(self) -> None:
        drawn = []
        for _ in range(2):
            with connect(seed=7) as runtime:
                group = runtime.reserve().spawn({"maker": colocate.role(Maker)}, name="gpu")
                drawn.append(group.role("maker", Maker).draw())
        assert drawn[0] == drawn[1]

    def test_unfinished_work_is_waited_for(self, group: ColocatedGroup) -> None:
        """A resident whose kernels still run is complete for a role and for the driver, 200 times."""
        maker, user = group.role("maker", Maker), group.role("user", User)
        x = torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) / 16
        expected = user.total(maker.chain(x, 10))[0]
        for turn in range(200):
            with maker.chain.keep(x, 10) as kept:
                found = user.total(kept.ref)[0] if turn % 2 else float(kept.fetch().double().sum())
            assert found == pytest.approx(expected, rel=1e-4)

    @needs_cuda
    def test_spans_are_the_gpus_time(self) -> None:
        """A call's span includes the kernels that it has launched, which may end after the method's return."""
        told: list[colocate.CallRecord] = []

        class Listening:
            def colocate_call_finished(self, record: colocate.CallRecord) -> None:
                told.append(record)

        with connect() as runtime:
            runtime.observe(Listening())
            spoiler = runtime.reserve().spawn({"spoiler": colocate.role(Spoiler)}).role("spoiler", Spoiler)
            spoiler.begin()
            spoiler.is_idle()
        took = {record.method: end - start for record in told for _, start, end in record.spans}
        assert took["begin"] > 0.2 > took["is_idle"]

    @needs_cuda
    def test_out_of_memory(self, group: ColocatedGroup) -> None:
        """An out-of-memory error is the call's, and names the worker's memory; the next call succeeds."""
        maker = group.role("maker", Maker)
        with pytest.raises(RoleError, match=r"(?s)out of memory.*memory of this worker") as caught:
            maker.take(4096.0)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert torch.equal(maker.make(3).cpu(), torch.arange(3.0))

    @needs_cuda
    def test_killed_worker_frees_gpu_memory(self) -> None:
        """Most of the GPU's memory is free again after a worker was killed, five times."""
        _, total = torch.cuda.mem_get_info()
        amount = 0.6 * total / 2**30
        for _ in range(5):
            with connect() as runtime:
                maker = runtime.reserve().spawn({"maker": colocate.role(Maker)}).role("maker", Maker)
                (pid,) = maker.take(amount)
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(WorkerDied):
                    maker.draw()
            wait_until(lambda: torch.cuda.mem_get_info()[0] > 0.6 * total, "its memory is free")

    @needs_cuda
    def test_nccl_with_one_rank(self, processes: ColocatedGroup, record_property: Any) -> None:
        """NCCL works with one rank, also after failed calls, and its memory is recorded."""
        maker = processes.role("maker", Maker)
        assert maker.reduced(3.0) == [("cpu:gloo,cuda:nccl", 3.0)]
        parts = processes.memory().slots[0].unowned
        assert parts["context"] > 0
        told = f"{parts['nccl'] / 2**20:.0f} MiB" if "nccl" in parts else "torch doesn't tell"
        record_property("memory of the GPU that NCCL has, with one rank", told)
        for turn in range(10):
            assert maker.reduced(float(turn)) == [("cpu:gloo,cuda:nccl", float(turn))]
            with pytest.raises(RoleError):
                maker.take(4096.0)

    @needs_cuda
    @pytest.mark.alone
    def test_copies(self, processes: ColocatedGroup, record_property: Any) -> None:
        """Record how fast values are copied between the driver and a process's GPU."""
        maker, user = processes.role("maker", Maker), processes.role("user", User)
        amount = 2**28
        x = torch.ones(amount // 4)
        user.seen(x)
        begin = time.perf_counter()
        user.seen(x)
        there = time.perf_counter() - begin
        seconds = []
        for _ in range(2):
            with maker.make.keep(amount // 4) as kept:
                kept.wait()
                for _ in range(2):
                    begin = time.perf_counter()
                    kept.fetch()
                    seconds.append(time.perf_counter() - begin)
        back, again = seconds[2:]
        speed = pinned_speed(amount)
        for what, took in (("256 MiB from the driver to a process's GPU", there), ("256 MiB from there to it", back)):
            record_property(what, f"{amount / took / 1e9:.1f} GB/s, {amount / took / speed:.2f} x pinned copies")
        record_property("the same resident once more", f"{amount / again / 1e9:.1f} GB/s")

    @pytest.mark.parametrize("chunks", [0.4, 1.0, 3.0, 7.3])
    def test_through_the_ring(self, group: ColocatedGroup, chunks: float) -> None:
        """Values of sizes around the ring's buffers arrive and return unchanged, twenty times."""
        user = group.role("user", User)
        count = int(chunks * (4 << 20) / 4) + 1
        for turn in range(20):
            x = torch.arange(float(count)) + turn
            assert user.total(x) == [float(x.double().sum())]
            assert torch.equal(user.echo(x).cpu(), x)

    def test_one_copy_for_all(self, processes: ColocatedGroup) -> None:
        """A resident has one copy on the host for all fetches, which counts there until the resident is freed."""
        maker = processes.role("maker", Maker)
        count = 1 << 20

        def on_host() -> int:
            roles = processes.memory().slots[0].roles
            return sum(each.host.get("residents", 0) for each in roles)

        with maker.make.keep(count) as kept:
            for _ in range(3):
                assert torch.equal(kept.fetch(), torch.arange(float(count)))
                assert on_host() == (0 if DRY else 4 * count)
        wait_until(lambda: on_host() == 0, "nothing is left of it")

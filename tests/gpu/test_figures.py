"""Costs and savings of sharing a GPU: figures for docs/internals/gpu.md. See test_gpu.py."""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.bench.measure import asking
from tests.gpu.test_gpu import DEVICE, DRY, Sharded, connect, needs_cuda, spawned

torch = pytest.importorskip("torch")

import colocate  # noqa: E402
from colocate import First, Role, method  # noqa: E402
from colocate.errors import CallTimeout, ColocateError  # noqa: E402
from colocate.features.memory.offload import allocate_pinned  # noqa: E402
from colocate.testing.waiting import wait_until  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not (DRY or torch.cuda.is_available()), reason="needs CUDA"),
]
SMALL_KERNELS, ROUNDS, PROCESSES = (100, 3, 2) if DRY else (1000, 100, 4)
STEPS = 2 if DRY else 7
CORE = max(os.sched_getaffinity(0))
SIZE = "tiny" if DRY else "half-a-billion"


class Busy(Role):
    def __init__(self) -> None:
        self.x = torch.zeros(64, device=self.ctx.device)

    @method(collect=First())
    def small(self, kernels: int) -> float:
        """Return the seconds that so many kernels take."""
        return small(self.x, kernels)

    @method
    def stay_on(self, core: int) -> None:
        os.sched_setaffinity(0, {core})

    @method
    def spin(self) -> None:
        torch.cuda._sleep(10**12)
        torch.cuda.synchronize()

    @method
    def work(self, rounds: int) -> torch.Tensor:
        """Compute for some time; return the result."""
        x = torch.eye(4096 if not DRY else 64, device=self.ctx.device)
        for _ in range(rounds):
            x = x @ x
        return x


def small(x: Any, kernels: int) -> float:
    began = time.perf_counter()
    for _ in range(kernels):
        x.add_(1)
    float(x[0])  # This waits for the kernels.
    return time.perf_counter() - began


PLAIN = """
import os, sys, time, torch
{small}
x = torch.zeros(64, device=sys.argv[1])
os.sched_setaffinity(0, {{int(sys.argv[2])}})
for line in sys.stdin:
    print(small(x, int(line)), flush=True)
"""


class TestOverhead:
    def test_small_kernels(self, record_property: Any) -> None:
        """Measure how fast methods launch kernels beside plain scripts, with several processes of both.

        Methods and scripts take turns of a few milliseconds on one core: cores of a machine in use, and its seconds,
        differ by more than the effect.
        """
        import inspect

        source = inspect.getsource(small).replace("Any", "object")
        command = [sys.executable, "-c", PLAIN.format(small=source), DEVICE, str(CORE)]
        with connect() as runtime, contextlib.ExitStack() as stack:
            ways: dict[str, list[Callable[[int], float]]] = {"plain": [], "ours": []}
            for number in range(PROCESSES):
                ask = stack.enter_context(asking(command))
                pool = runtime.reserve()
                busy = pool.spawn({"busy": colocate.role(Busy)}, name=f"busy-{number}").role("busy", Busy)
                busy.stay_on(CORE)
                ways["ours"].append(busy.small)
                ways["plain"].append(lambda kernels, ask=ask: float(ask(str(kernels))))  # type: ignore[misc]
            took: dict[str, list[list[float]]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                turn = [(name, number) for name in ways for number in range(PROCESSES)]
                random.shuffle(turn)
                found = {(name, number): ways[name][number](SMALL_KERNELS) for name, number in turn}
                usual = statistics.median(found.values())
                for name in ways:
                    took[name].append([found[name, number] / usual for number in range(PROCESSES)])
        each = {name: [statistics.median(turns) for turns in zip(*took[name], strict=True)] for name in ways}
        ratio = statistics.median(each["ours"]) / statistics.median(each["plain"])
        least, *_, most = sorted(one / statistics.median(each["plain"]) for one in each["plain"])
        record_property(
            f"{ROUNDS} times {SMALL_KERNELS} small kernels beside a plain script, {PROCESSES} processes of either",
            f"{ratio:.3f} x (scripts among themselves {least:.2f} to {most:.2f})",
        )

    @needs_cuda
    def test_fetch_does_not_wait_for_lane(self) -> None:
        """A complete result is fetched while the lane computes another call."""
        with connect() as runtime:
            busy = runtime.reserve().spawn({"busy": colocate.role(Busy)}).role("busy", Busy)
            kept = busy.work.keep(1)
            kept.wait()
            call = busy.work.submit(3000)
            kept.fetch()
            assert not call.done()
            call.result()


class Holder(Role):
    """A role with many bytes of weights, which can load as many."""

    def __init__(self, value: float, tensors: int, numbers: int) -> None:
        shape = {"dtype": torch.bfloat16, "device": self.ctx.device}
        self.weights = {f"layer.{n}": torch.full((numbers,), value, **shape) for n in range(tensors)}

    def named_weights(self) -> Any:
        return self.weights.items()

    def load_weights(self, weights: Any, version: int) -> None:
        for name, tensor in weights:
            self.weights[name].copy_(tensor)

    @method(collect=First())
    def seconds(self, rounds: int) -> float:
        """Return the least seconds of several copies of all weights into existing memory."""
        into, took = {name: torch.empty_like(each) for name, each in self.weights.items()}, []
        for _ in range(rounds):
            began = time.perf_counter()
            for name, tensor in self.weights.items():
                into[name].copy_(tensor)
            _finish()
            took.append(time.perf_counter() - began)
        return min(took)

    @method(collect=First())
    def value(self) -> float:
        _finish()
        return float(self.weights["layer.0"][-1])


def _finish() -> None:
    if not DRY:
        torch.cuda.synchronize()


class TestSync:
    """Weight syncs between the roles of a slot."""

    def test_beside_copies(self, record_property: Any) -> None:
        """A sync copies all weights; its speed is recorded beside plain copies on the device."""
        tensors, numbers = (4, 1 << 10) if DRY else (28, 1 << 28)
        actor, engine = (colocate.role(Holder, float(value), tensors, numbers) for value in range(2))
        with spawned({"actor": actor, "engine": engine}) as group:
            roles = group.role("actor", Holder), group.role("engine", Holder)
            took = []
            for _ in range(3 if DRY else 8):
                began = time.perf_counter()
                sync = colocate.sync_weights(*roles)
                roles[1].value()
                took.append(time.perf_counter() - began)
            assert roles[1].value() == 0.0
            plain = roles[1].seconds(3)
        record_property(
            f"{sync.nbytes / 1e9:.0f} GB of weights from role to role in a slot, beside copies on the device",
            f"{plain / min(took):.2f} x their speed",
        )


class TestPinning:
    """Pinned memory of the host, as a role's first sleep needs it."""

    @needs_cuda
    def test_copy_to_pinned_memory_is_exact(self, record_property: Any) -> None:
        """A device copy into memory pinned for a sleep is exact; the time is recorded beside torch's own pinning."""
        size = 2 * 2**30
        torch.cuda.init()
        began = time.perf_counter()
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
        record_property("2 GiB of the host pinned by torch", f"{time.perf_counter() - began:.2f} s")
        began = time.perf_counter()
        (memory,) = allocate_pinned(size, DEVICE)
        record_property("the same for what sleeps", f"{time.perf_counter() - began:.2f} s")
        assert memory.is_pinned()
        source = torch.arange(size // 8, device=DEVICE)
        memory.copy_(source.view(torch.uint8), non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(memory.view(torch.int64).to(DEVICE), source)
        del source
        torch.cuda.empty_cache()  # Later tests measure the GPU's memory.


class TestContexts:
    @needs_cuda
    def test_four_roles(self, record_property: Any) -> None:
        """Four roles in one process use less of the GPU than in four processes."""
        names = ("actor", "critic", "reference", "reward")
        used = []
        for together in (True, False):
            with connect() as runtime:
                before = torch.cuda.mem_get_info()[0]
                for roles in [names] if together else [(name,) for name in names]:
                    runtime.reserve().spawn({name: colocate.role(Busy) for name in roles}, name=roles[0])
                used.append(before - torch.cuda.mem_get_info()[0])
            wait_until(lambda before=before: torch.cuda.mem_get_info()[0] >= before, "its memory is free")
        assert used[0] < used[1]
        record_property("four roles in one process", f"{used[0] / 2**20:.0f} MiB of the GPU")
        record_property("the same in four processes", f"{used[1] / 2**20:.0f} MiB of the GPU")


class TestGroups:
    """Process groups that are made again and again."""

    def test_fifty(self, record_property: Any) -> None:
        """A role's group and the default group are made anew 25 times, and the GPU loses less than 64 MiB."""
        role = colocate.role(Sharded, "ddp").on(default_group=True)
        with spawned({"sharded": role}, name="sharded") as group:
            sharded = group.role("sharded", Sharded)
            sharded.step(0)
            sharded.cut()
            free = 0 if DRY else torch.cuda.mem_get_info()[0]
            seconds = []
            for number in range(5 if DRY else 25):
                began = time.perf_counter()
                sharded.cut()
                sharded.step(number)
                seconds.append(time.perf_counter() - began)
            sharded.cut()
            if not DRY:
                lost = free - torch.cuda.mem_get_info()[0]
                assert lost < 64 * 2**20
                record_property("50 process groups made anew, memory of the GPU lost", f"{lost / 2**20:.0f} MiB")
            record_property(
                "two process groups cut and made anew, and a step", f"{statistics.median(seconds) * 1e3:.0f} ms"
            )


class TestSpinning:
    """A kernel that doesn't end."""

    @needs_cuda
    def test_endless_kernel_times_out(self, record_property: Any) -> None:
        """A call with an endless kernel times out, its group closes, and the GPU is free for another group."""
        with connect() as runtime:
            group = runtime.reserve().spawn({"busy": colocate.role(Busy)}, name="spinning")
            with pytest.raises(CallTimeout):
                group.role("busy", Busy).spin.options(timeout=2)()
            began = time.perf_counter()
            try:
                group.close(grace=1, force=True)
            except* ColocateError:
                pass  # The worker had to be killed.
            record_property(
                "a worker with a spinning kernel is gone, beside 1 s of grace",
                f"{time.perf_counter() - began - 1:.2f} s",
            )
            other = runtime.reserve().spawn({"busy": colocate.role(Busy)}, name="other")
            assert other.role("busy", Busy).small(10) < 60


class Llama(Role):
    """A model with the operations of tests/gpu/loop.py."""

    def __init__(self, size: str, seed: int) -> None:
        from tests.gpu.loop import SIZES, Learner

        self.learner = Learner(SIZES[size], self.ctx.device, seed)

    @method(collect=First())
    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        return self.learner.generate(prompts)

    @method(collect=First())
    def log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.learner.log_probs(tokens)

    @method(collect=First())
    def values(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.learner.values(tokens)

    @method(collect=First())
    def learn_policy(self, tokens: torch.Tensor, old: torch.Tensor, both: tuple[torch.Tensor, torch.Tensor]) -> float:
        return self.learner.learn_policy(tokens, old, both[0])

    @method(collect=First())
    def learn_values(self, tokens: torch.Tensor, both: tuple[torch.Tensor, torch.Tensor]) -> float:
        return self.learner.learn_values(tokens, both[1])

    @method
    def stay_on(self, core: int) -> None:
        """Compute on this core of the machine from now on."""
        os.sched_setaffinity(0, {core})

    @method(collect=First())
    def advantages(self, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from tests.gpu.loop import advantages

        return advantages(*given)


class TestLlama:
    """PPO with models of half a billion parameters in bfloat16."""

    def test_beside_a_loop_by_hand(self, record_property: Any) -> None:
        """Roles have the losses of a loop by hand; both speeds are recorded, in turns on one core."""
        from tests.gpu.loop import SIZES, prompts

        size = SIZES[SIZE]
        command = [sys.executable, "-m", "tests.gpu.loop", SIZE, DEVICE, str(CORE)]
        seconds: dict[str, list[float]] = {"script": [], "roles": []}
        with connect() as runtime, contextlib.ExitStack() as stack:
            script = stack.enter_context(asking(command))
            roles = {name: colocate.role(Llama, SIZE, seed) for name, seed in (("actor", 1), ("critic", 2), ("ref", 1))}
            group = runtime.reserve().spawn(roles, name="llama")
            actor, critic, reference = (group.role(name, Llama) for name in roles)
            actor.stay_on(CORE)

            def ask(step: int) -> tuple[float, float]:
                began = time.perf_counter()
                with group.scope(), group.pipeline():
                    tokens = actor.generate.keep(prompts(size, step))
                    old, other = actor.log_probs.keep(tokens.ref), reference.log_probs.keep(tokens.ref)
                    values = critic.values.keep(tokens.ref)
                    both = actor.advantages.keep(old.ref, other.ref, values.ref, tokens.ref)
                    learned = critic.learn_values.submit(tokens.ref, both.ref)
                    policy = actor.learn_policy.submit(tokens.ref, old.ref, both.ref)
                losses = learned.result(), policy.result()
                seconds["roles"].append(time.perf_counter() - began)
                return losses

            def ask_script(step: int) -> tuple[float, float]:
                values, policy, took = json.loads(script(str(step)))
                seconds["script"].append(took)
                return values, policy

            for step in range(STEPS):
                first, second = (ask, ask_script) if step % 2 else (ask_script, ask)
                assert first(step) == second(step)
        # In the first pair kernels are still being chosen.
        pairs = list(zip(seconds["script"], seconds["roles"], strict=True))[1:]
        ratio = statistics.median(plain / ours for plain, ours in pairs)
        speed = size.batch * size.response / statistics.median(ours for _, ours in pairs)
        record_property("PPO with a Llama's shape of 0.5B, bfloat16", f"{speed:.0f} tokens/s")
        spread = f"{min(plain / ours for plain, ours in pairs):.3f} to {max(plain / ours for plain, ours in pairs):.3f}"
        record_property("the same beside the loop by hand", f"{ratio:.3f} x (of {len(pairs)} pairs: {spread})")

"""What sharing a GPU costs and saves there: figures for docs/gpu.md. See test_gpu.py."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.test_gpu import DEVICE, DRY, Sharded, connect, needs_cuda

torch = pytest.importorskip("torch")

import colocate  # noqa: E402
from colocate import First, Role, method  # noqa: E402
from colocate.errors import CallTimeout, ColocateError  # noqa: E402
from colocate.testing.waiting import wait_until  # noqa: E402
from colocate.worker.pinned import pinned  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not (DRY or torch.cuda.is_available()), reason="needs CUDA"),
]
ROOT = Path(__file__).parents[2]
SMALL_KERNELS, STEPS = (100, 2) if DRY else (10_000, 5)
TURNS, PAIRS = (3, 1) if DRY else (11, 5)
SIZE = "tiny" if DRY else "half-a-billion"


class Busy(Role):
    """Has the GPU do many small things, one that takes long, or nothing."""

    def __init__(self) -> None:
        self.x = torch.zeros(64, device=self.ctx.device)

    @method(collect=First())
    def small(self, kernels: int) -> float:
        """The seconds that so many take."""
        return small(self.x, kernels)

    @method
    def spin(self) -> None:
        """For minutes."""
        torch.cuda._sleep(10**12)
        torch.cuda.synchronize()

    @method
    def work(self, rounds: int) -> torch.Tensor:
        """For some time; what comes of it."""
        x = torch.eye(4096 if not DRY else 64, device=self.ctx.device)
        for _ in range(rounds):
            x = x @ x
        return x


def small(x: Any, kernels: int) -> float:
    began = time.perf_counter()
    for _ in range(kernels):
        x.add_(1)
    float(x[0])  # waits for them
    return time.perf_counter() - began


PLAIN = """
import sys, time, torch
{small}
x = torch.zeros(64, device=sys.argv[1])
for line in sys.stdin:
    print(small(x, int(line)), flush=True)
"""


class TestOverhead:
    """Beside a plain script."""

    def test_small_kernels(self, record_property: Any) -> None:
        """What a method launches it launches as fast as a script: in turns, by several processes of either."""
        import inspect

        command = [sys.executable, "-c", PLAIN.format(small=inspect.getsource(small).replace("Any", "object")), DEVICE]
        ratios = []
        for _ in range(PAIRS):
            with (
                subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as script,
                connect() as runtime,
            ):
                assert script.stdin is not None
                assert script.stdout is not None
                busy = runtime.reserve().spawn({"busy": colocate.role(Busy)}).role("busy", Busy)
                plain, ours = [], []
                for _ in range(TURNS):
                    script.stdin.write(f"{SMALL_KERNELS}\n")
                    script.stdin.flush()
                    plain.append(float(script.stdout.readline()))
                    ours.append(busy.small(SMALL_KERNELS))
                script.stdin.close()
            ratios.append(min(ours) / min(plain))  # what disturbs either makes it slower
        what = f"{SMALL_KERNELS} small kernels beside a plain script"
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        record_property(what, f"{statistics.median(ratios):.3f} x (of {PAIRS} pairs: {spread})")

    @needs_cuda
    def test_a_fetch_waits_for_nobody(self) -> None:
        """What is complete is copied while the lane computes something else."""
        with connect() as runtime:
            busy = runtime.reserve().spawn({"busy": colocate.role(Busy)}).role("busy", Busy)
            kept = busy.work.keep(1)
            kept.wait()
            call = busy.work.submit(3000)
            kept.fetch()
            assert not call.done()
            call.result()


class TestPinning:
    """Memory of the host that the GPU copies from and to by itself, as a role's first sleep needs it."""

    @needs_cuda
    def test_how_long_it_takes(self, record_property: Any) -> None:
        """As torch does it, and as the memory to which a role's goes as it sleeps; the device copies by itself."""
        size = 2 * 2**30
        torch.cuda.init()
        began = time.perf_counter()
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
        record_property("2 GiB of the host pinned by torch", f"{time.perf_counter() - began:.2f} s")
        began = time.perf_counter()
        (memory,) = pinned(size, DEVICE)
        record_property("the same for what sleeps", f"{time.perf_counter() - began:.2f} s")
        assert memory.is_pinned()
        source = torch.arange(size // 8, device=DEVICE)
        memory.copy_(source.view(torch.uint8), non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(memory.view(torch.int64).to(DEVICE), source)
        del source
        torch.cuda.empty_cache()  # tests that come after this one look at who has how much


class TestContexts:
    """Several roles in one process."""

    @needs_cuda
    def test_four_roles(self, record_property: Any) -> None:
        """Beside four processes with one each: how much of the GPU is used."""
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
    """Process groups that come and go."""

    def test_fifty(self, record_property: Any) -> None:
        """A role's and the default one, each cut and made anew 25 times; the GPU's memory doesn't go with them."""
        with connect() as runtime:
            role = colocate.role(Sharded, "ddp").on(default_group=True)
            group = runtime.reserve().spawn({"sharded": role}, name="sharded")
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
    def test_it_is_given_up(self, record_property: Any) -> None:
        """The call times out, its group is closed in time, and the GPU is free for others."""
        with connect() as runtime:
            group = runtime.reserve().spawn({"busy": colocate.role(Busy)}, name="spinning")
            with pytest.raises(CallTimeout):
                group.role("busy", Busy).spin.options(timeout=2)()
            began = time.perf_counter()
            try:
                group.close(grace=1, force=True)
            except* ColocateError:
                pass  # that it had to be killed
            record_property(
                "a worker with a spinning kernel is gone, beside 1 s of grace",
                f"{time.perf_counter() - began - 1:.2f} s",
            )
            other = runtime.reserve().spawn({"busy": colocate.role(Busy)}, name="other")
            assert other.role("busy", Busy).small(10) < 60


class Llama(Role):
    """A model, as tests/gpu/loop.py has it."""

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

    @method(collect=First())
    def advantages(self, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from tests.gpu.loop import advantages

        return advantages(*given)


class TestLlama:
    """PPO with models of half a billion parameters in bfloat16."""

    def test_beside_a_loop_by_hand(self, record_property: Any) -> None:
        """Equal losses; and how many tokens a second."""
        from tests.gpu.loop import SIZES, prompts

        size = SIZES[SIZE]
        command = [sys.executable, "-m", "tests.gpu.loop", SIZE, DEVICE, str(STEPS)]
        plain = json.loads(subprocess.check_output(command, text=True, cwd=ROOT).splitlines()[-1])
        told: dict[str, list[float]] = {"policy": [], "values": [], "seconds": []}
        with connect() as runtime:
            roles = {name: colocate.role(Llama, SIZE, seed) for name, seed in (("actor", 1), ("critic", 2), ("ref", 1))}
            group = runtime.reserve().spawn(roles, name="llama")
            actor, critic, reference = (group.role(name, Llama) for name in roles)
            for step in range(STEPS):
                began = time.perf_counter()
                with group.scope(), group.pipeline():
                    tokens = actor.generate.keep(prompts(size, step))
                    old, other = actor.log_probs.keep(tokens.ref), reference.log_probs.keep(tokens.ref)
                    values = critic.values.keep(tokens.ref)
                    both = actor.advantages.keep(old.ref, other.ref, values.ref, tokens.ref)
                    learned = critic.learn_values.submit(tokens.ref, both.ref)
                    policy = actor.learn_policy.submit(tokens.ref, old.ref, both.ref)
                told["values"].append(learned.result())
                told["policy"].append(policy.result())
                told["seconds"].append(time.perf_counter() - began)
        assert told["policy"] == plain["policy"]
        assert told["values"] == plain["values"]
        ratio = statistics.median(plain["seconds"][1:]) / statistics.median(told["seconds"][1:])
        speed = size.batch * size.response / statistics.median(told["seconds"][1:])
        record_property("PPO with a Llama's shape of 0.5B, bfloat16", f"{speed:.0f} tokens/s")
        record_property("the same beside the loop by hand", f"{ratio:.3f} x")

"""What vLLM costs in a role: `python -m tests.rollout.figures`, a part of `make engines`.

Ratios of things measured side by side in one run, each beside its bar; status 1 when one isn't met.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import colocate
from colocate_rollout.contract import Prompt, Sampling
from colocate_rollout.role import EngineRole
from colocate_rollout.testing import LLAMA, PROMPTS, Trainer, made, weights_of

# 930 MiB in float32, of which the largest layers are 63 MiB each.
LARGE = {
    **LLAMA,
    "vocab_size": 16000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "initializer_range": 0.02,
}
SMALL = {**LLAMA, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256}
SEEDED = Sampling(max_tokens=64, seed=7)
OPTIONS: dict[str, Any] = {"engine": "vllm", "kv_cache_memory_bytes": "64MiB"}


def resident(name: str = "VmRSS") -> int:
    """Bytes of this process that are in memory, or were at most (`VmHWM`)."""
    if name == "VmRSS":  # without what is free, and kept by `malloc`
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) * 1024


def cpu(what: Callable[[], object]) -> float:
    """Seconds that all threads of this process take for it."""
    before = time.process_time()
    what()
    return time.process_time() - before


def weights() -> Iterator[tuple[str, float, float]]:
    """A sync of 930 MiB. vLLM packs them into new memory each time, as the copy beside it goes to new memory."""
    model = made(LARGE)
    nbytes = sum(each.nbytes for each in model.parameters())
    role = EngineRole(model=LARGE, **OPTIONS)
    for number in range(3):
        role.load_weights(weights_of(model), number)
    ratios, peaks = [], list[float]()
    for number in range(5):
        copied = cpu(lambda: [each.detach().clone() for each in model.parameters()])
        before = resident()
        Path("/proc/self/clear_refs").write_text("5")
        ratios.append(cpu(lambda number=number: role.load_weights(weights_of(model), number)) / copied)
        peaks.append((resident("VmHWM") - before) / nbytes)
    yield "vLLM, weights of 930 MiB: CPU seconds beside one copy", statistics.median(ratios), 3.2
    yield "vLLM, weights of 930 MiB: memory above, beside their bytes", statistics.median(peaks), 0.35
    before = resident()
    for number in range(20):
        role.load_weights(weights_of(model), number)
    yield "vLLM: what 20 syncs leave, beside the bytes of one", max(0.0, (resident() - before) / nbytes), 0.01
    role.close()


def batches() -> Iterator[tuple[str, float, float]]:
    """128 rows, beside vLLM's own loop over the same requests."""
    role = EngineRole(model=SMALL, max_num_seqs=128, **OPTIONS)
    role.load_weights(weights_of(made(SMALL)), 1)
    engine: Any = role._engine
    given = [Prompt(number, tuple(PROMPTS[number % 8]), (number,)) for number in range(128)]
    sampling = Sampling(max_tokens=64, stop_token_ids=())

    def rows() -> None:
        assert sum(len(row.token_ids) for row in engine.rows(given, sampling, lambda: False)) == 128 * 64

    def plain() -> None:
        with engine._guest.inside():
            for prompt, _, parameters in engine._parameters(given, sampling):
                ids = {"prompt_token_ids": [*prompt.token_ids]}
                engine._engine.add_request(str(prompt.index), ids, parameters)
            while engine._engine.has_unfinished_requests():
                engine._engine.step()

    rows()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other in loops, which counts as work
    ours, theirs = (min(each) for each in zip(*((cpu(rows), cpu(plain)) for _ in range(5)), strict=True))
    torch.set_num_threads(threads)
    yield "vLLM, 128 rows one by one: CPU seconds beside its own loop over one batch", ours / theirs, 1.1
    role.close()


def groups() -> Iterator[tuple[str, float, float]]:
    """In a group."""
    roles = {
        "trainer": colocate.role(Trainer, SMALL),
        "engine": colocate.role("rollout.engine", model=SMALL, max_num_seqs=64, **OPTIONS),
    }
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(slots=1) as pool:
        group = pool.spawn(roles)
        trainer, engine = group.role("trainer"), group.role("engine")
        colocate.sync_weights(trainer, engine)
        endless = Sampling(max_tokens=100, stop_token_ids=())
        late = []
        for _ in range(3):
            begun = time.monotonic()
            engine.generate(PROMPTS * 8, sampling=endless)
            step = (time.monotonic() - begun) / 100
            begun = time.monotonic()
            with contextlib.suppress(colocate.CallTimeout):
                engine.generate.options(timeout=1.0)(PROMPTS * 8, 64, sampling=endless)
            trainer.step()
            late.append(time.monotonic() - begun - 1.0 - step)
        yield "vLLM: seconds from a timeout, and a step, to the trainer's next step", statistics.median(late), 0.5
        late = []
        for _ in range(7):
            own = group.run(first_row)[0]
            begun = time.monotonic()
            with engine.generate.stream(PROMPTS * 8, sampling=SEEDED) as rows:
                next(rows)
                late.append(time.monotonic() - begun - own)
        yield "vLLM: seconds of the first row of a stream, above those in the worker", statistics.median(late), 0.02
        gone = group.sleep("engine", ["cache"])
        yield "vLLM: bytes of a cache of 64 MiB that are left when it sleeps", 1 - gone / (64 << 20), 0.02


def first_row(ctx: colocate.Context) -> float:
    """Seconds until the engine has it, as the worker sees it."""
    begun = time.monotonic()
    rows = iter(ctx.sibling("engine", EngineRole).generate(PROMPTS * 8, sampling=SEEDED))
    next(rows)
    found = time.monotonic() - begun
    rows.close()  # type: ignore[attr-defined]
    return found


def main() -> int:
    """Print the table."""
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    met = True
    for part in (weights, batches, groups):
        for name, found, bar in part():
            met = met and found <= bar
            print(f"{name:78} {found:8.3f}  at most {bar:<5} {'' if found <= bar else 'NOT MET'}", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

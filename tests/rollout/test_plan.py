"""`colocate plan` predicts the memory of engines without making one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import CommandLine
from tests.distributions.install import Installed
from tests.forked import Forks

from colocate_rollout.testing import LLAMA, make_model

MIB = 1 << 20
MODEL = {**LLAMA, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096}
VLLM = {"engine": "vllm", "kv_cache_memory_bytes": "5MiB"}


@pytest.fixture
def colocate(tmp_path: Path, installed: Installed, forks: Forks) -> CommandLine:
    command = CommandLine(tmp_path, installed, forks)
    (tmp_path / "vllm").mkdir()
    command.write("vllm/__init__.py", "raise SystemExit('vLLM is imported')")
    return command


def planned(colocate: CommandLine, options: Mapping[str, Any], **role: Any) -> dict[str, int]:
    """Return the planned memory of an engine beside a trainer, by kind."""
    trainer = {"use": "colocate_rollout.testing:Trainer", "with": {"model": MODEL}}
    roles = {"trainer": trainer, "rollout": {"use": "rollout.engine", "with": dict(options), **role}}
    groups = {"policy": {"pool": "main", "roles": roles}}
    executor = {"use": "local", "with": {"processes": True}}
    config = {"executor": executor, "pools": {"main": {"slots": 2}}, "groups": groups}
    (colocate.folder / "demo.yaml").write_text(json.dumps(config))
    done = colocate("plan", "demo.yaml", "--json")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    ((_, found),) = (group["roles"] for group in json.loads(done.stdout))
    return dict(found["kinds"])


@pytest.mark.long
def test_vllm(colocate: CommandLine, tmp_path: Path) -> None:
    """vLLM's weights and cache are planned from the model's config and the options, without importing vLLM."""
    model = make_model(MODEL)
    numbers = sum(each.numel() for each in model.parameters())
    vectors = sum(each.numel() for each in model.parameters() if each.ndim == 1)
    assert planned(colocate, {**VLLM, "role": "trainer"}) == {"parameters": 4 * numbers, "tensors": 5 * MIB}
    half = {"parameters": 2 * numbers, "tensors": 5 * MIB}
    assert planned(colocate, {**VLLM, "model": MODEL, "dtype": "bfloat16", "child": True}) == half
    model.save_pretrained(tmp_path / "model")
    assert planned(colocate, {**VLLM, "model": str(tmp_path / "model")}) == half
    assert planned(colocate, {**VLLM, "role": "trainer"}, mesh={"dp": 1, "tp": 2}) == {
        "parameters": 4 * ((numbers - vectors) // 2 + vectors),
        "tensors": 5 * MIB,
    }
    assert planned(colocate, {"engine": "vllm", "role": "trainer"})["tensors"] == 1 << 30


@pytest.mark.long
def test_transformers(colocate: CommandLine) -> None:
    """The plan has the engine's cache for all rows, and parameters only of a model of its own."""
    numbers = sum(each.numel() for each in make_model(MODEL).parameters())
    options = {"engine": "transformers", "max_rows": 4, "max_length": 63}
    cache = {"tensors": 4 * 2 * 2 * 4 * 8 * 64 * 32}
    assert planned(colocate, {**options, "role": "trainer"}) == cache
    own = {"parameters": 4 * numbers, "buffers": 2 * 16 * 4, **cache}
    assert planned(colocate, {**options, "model": MODEL}) == own
    assert planned(colocate, {**options, "model": MODEL, "child": True}) == own

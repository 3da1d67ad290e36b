"""A model that an actor and an engine share: its dtype, its copies, and rows that are too long for it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ppo.chats import own_tokenizer
from torch import nn

import colocate
from colocate import ConfigError, First, method
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.spread import Dtype
from colocate_ppo.task import Problem, Problems
from colocate_rollout.role import EngineRole

QUESTIONS = Problems.from_list(Problem("ab" * (1 + number), "", {}) for number in range(4))


class Watched(GroupActor):
    """An actor that records the dtypes in which a layer computes."""

    @method
    def watch(self) -> None:
        self.seen: set[str] = set()
        layer: Any = self.model.module.model.layers[0].mlp.down_proj
        layer.register_forward_hook(lambda _module, _inputs, output: self.seen.add(str(output.dtype)))

    @method(collect=First())
    def dtypes(self) -> list[str]:
        seen, self.seen = sorted(self.seen), set()
        return seen


@pytest.mark.in_make_test("none-float32", "none-bfloat16", "fsdp2-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parallel", ["none", "ddp", "fsdp2"])
def test_dtype(parallel: str, dtype: str) -> None:
    """An engine with the actor's model computes in the actor's dtype, as updates do, and weights stay float32."""
    roles = {
        "actor": colocate.role(Watched, hidden=32, layers=1, dtype=dtype, parallel=parallel),
        "rollout": colocate.role("rollout.engine", engine="transformers", role="actor"),
    }
    slots = 1 if parallel == "none" else 2
    with colocate.connect("local", processes=slots > 1) as runtime, runtime.reserve(slots=slots) as pool:
        group = pool.spawn(roles)
        actor, rollout = group.role("actor", Watched), group.role("rollout", EngineRole)
        actor.watch()
        for _ in range(2):
            actor.generate(QUESTIONS, 4)
            assert actor.dtypes() == [f"torch.{dtype}"]
            prompts = actor.prompts(QUESTIONS)
            rows = rollout.generate(prompts, samples=2, sampling={"max_tokens": 4, "seed": 1})
            assert actor.dtypes() == [f"torch.{dtype}"]
            answered = actor.read(QUESTIONS, rows, 4)
            log_probs = actor.log_probs(answered)
            gap = (log_probs - answered["sampled"]).abs()[answered["mask"]].max()
            assert gap < (1e-5 if dtype == "float32" else 2e-2)
            advantages = actor.advantages(torch.arange(8.0), 2)
            learned = actor.learn(answered, log_probs, advantages)
            assert learned["policy_grad_norm"] > 0
            assert actor.dtypes() == [f"torch.{dtype}"]
        assert {weight.dtype for weight in actor.weights()["state"].values()} == {torch.float32}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(copied: Callable[[nn.Module], nn.Module], dtype: Dtype, checkpointing: bool) -> None:
    """A copy of a module computes with its own weights in the original's dtype, with or without gradients."""
    module: Any = GroupActor(hidden=32, layers=1, dtype=dtype, gradient_checkpointing=checkpointing).model.module
    ids = torch.arange(4)[None]
    expected = module(input_ids=ids).logits
    assert expected.dtype == getattr(torch, dtype)
    other: Any = copied(module)
    assert other(input_ids=ids).logits.equal(expected)
    with torch.no_grad():
        for parameter in other.model.layers[0].parameters():
            parameter.zero_()
    other(input_ids=ids).logits.float().square().sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not other(input_ids=ids).logits.equal(expected)
    with torch.no_grad():
        assert not other(input_ids=ids).logits.equal(expected)
        assert module(input_ids=ids).logits.equal(expected)


def phi(folder: Path) -> str:
    """Write a model with long-rope from 16 tokens on; return the folder."""
    from transformers import Phi3Config, Phi3ForCausalLM

    inner = own_tokenizer("nothing")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = Phi3Config(
        vocab_size=len(inner),
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=rope,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
    )
    Phi3ForCausalLM(config).save_pretrained(folder)
    inner.save_pretrained(folder)
    return str(folder)


def test_long_rope(tmp_path: Path) -> None:
    """A row beyond the model's short range would change the rows beside it: `generate` and `log_probs` refuse it."""
    actor = GroupActor(model=phi(tmp_path))
    rollout = actor.generate(QUESTIONS, 8, greedy=True)
    assert actor.generate(QUESTIONS[:1], 8, greedy=True)["token_ids"] == rollout["token_ids"][:1]
    actor.log_probs(rollout)
    with pytest.raises(ConfigError, match=r"a row of 17 tokens, .* long-rope .* more than 16"):
        actor.generate(QUESTIONS, 9)
    long = {**rollout, "tokens": rollout["tokens"].repeat(1, 2), "attention": torch.ones(4, 32, dtype=torch.bool)}
    with pytest.raises(ConfigError, match="a row of 32 tokens"):
        actor.log_probs(long)  # type: ignore[arg-type]

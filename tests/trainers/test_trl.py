"""The loss of `grpo.train` and its gradient equal TRL's, on the same tensors."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from colocate_ppo import maths
from colocate_ppo.forward import response_logits
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.task import Task

trl = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)

CLIP, CAP, R, SAMPLES = 0.1, 1.5, 6, 4
SIZES: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "feed_forward": 64}


@attrs.frozen
class Sampled:
    """An answer as an engine returns it."""

    token_ids: list[int]
    log_probs: list[float]


def trls_loss(actor: GroupActor, rollout: Any, beta: float, engine: bool, **inputs: Any) -> Any:
    """Return TRL's loss and metrics for `loss_type="bnpo"`, the mean over the tokens of the batch."""

    def log_probs(model: Any, tokens: Any, attention: Any, keep: int, **_: Any) -> tuple[Any, Any, None]:
        logits = response_logits(model, tokens, attention.bool(), keep)
        return logits.log_softmax(-1).gather(-1, tokens[:, -keep:, None]).squeeze(-1), maths.entropy(logits), None

    trainer = SimpleNamespace(
        model=actor.model.module,
        _get_per_token_logps_and_entropies=log_probs,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        loss_type="bnpo",
        beta=beta,
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        use_vllm=engine,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
    )
    tokens, attention = rollout["tokens"], rollout["attention"].long()
    loss = trl.GRPOTrainer._compute_loss(
        trainer,
        actor.model.module,
        {
            "prompt_ids": tokens[:, :-R],
            "prompt_mask": attention[:, :-R],
            "completion_ids": tokens[:, -R:],
            "completion_mask": rollout["mask"].long(),
            **inputs,
        },
    )
    return loss, trainer._metrics["eval"]


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("engine", [False, True])
def test_the_loss_is_that_of_trl(beta: float, engine: bool) -> None:
    """Loss, gradient norm, entropy and clip fraction equal TRL's, with clipped ratios, truncated weights and a KL."""
    actor = GroupActor(**SIZES)
    generator = torch.Generator().manual_seed(0)
    problems = Task(options={"min_word_len": 3, "max_word_len": 6}).draw(3)

    def some(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator) * 0.3

    lengths = torch.randint(1, R + 1, (len(problems) * SAMPLES,), generator=generator).tolist()
    drawn = [torch.randint(4, 60, (length,), generator=generator).tolist() for length in lengths]
    each = [Sampled(ids, [0.0] * len(ids)) for ids in drawn]
    rollout = actor.read(problems, [each[at : at + SAMPLES] for at in range(0, len(each), SAMPLES)], R)
    now = actor.log_probs(rollout)
    old, reference = now + some(*now.shape), now + some(*now.shape)
    sampled = old + 2 * some(*now.shape)
    if engine:
        rollout["sampled"] = sampled
    else:
        del rollout["sampled"]
    advantages = some(len(each))
    ratio = torch.exp(old - sampled).clamp(max=CAP)
    loss, theirs = trls_loss(
        actor,
        rollout,
        beta,
        engine,
        advantages=advantages,
        old_per_token_logps=old,
        ref_per_token_logps=reference,
        importance_sampling_ratio=ratio,
    )
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in actor.model.module.parameters() if p.grad is not None])
    ours = actor.learn(
        rollout,
        old,
        advantages,
        actor.lengths(rollout),
        reference if beta else None,
        minibatch=len(each),
        clip=CLIP,
        kl_coefficient=beta,
        importance_cap=CAP,
    )
    assert ours["policy_loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    assert ours["policy_grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert ours["entropy"] == pytest.approx(theirs["entropy"][0], rel=1e-5)
    assert ours["clip_fraction"] == pytest.approx(theirs["clip_ratio/region_mean"][0], rel=1e-5)
    assert ours["clip_fraction"] > 0
    if engine:
        assert 0 < ours["engine_truncated"] < 1

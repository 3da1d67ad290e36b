"""The steps of `ppo.train` under FSDP2 by hand, for torchrun: a plain loop without roles, calls or a driver.

`torchrun --nproc-per-node 2 ppo_by_hand.py CHECKPOINT OPTIONS SEEDS` goes on from a checkpoint of the job. What a step
computes are the plugin's functions, or nothing could be compared; the loop, the shards and the sums are its own.

It prints a line when it is ready, and makes a step for each line that it reads; of that it prints a line of JSON: its
seconds and its metrics.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM

from colocate_ppo import maths
from colocate_ppo.forward import response_log_probs, response_logits, response_values
from colocate_ppo.generation import generate
from colocate_ppo.model import ValueModel
from colocate_ppo.parallel import minibatches
from colocate_ppo.rollout import Rollout, join
from colocate_ppo.task import Task
from colocate_ppo.tokenizer import Padded, character_tokenizer


def total(tensor: Tensor) -> Tensor:
    result = tensor.detach().clone()
    dist.all_reduce(result)
    return result


def shard(model: Any, folder: Path) -> Any:
    layers = (model.backbone if isinstance(model, ValueModel) else model.model).layers
    for part in (*layers, model):
        fully_shard(part)
    whole(model, folder)
    return model


def whole(model: nn.Module, folder: Path) -> nn.Module:
    load({"model": model.state_dict()}, checkpoint_id=folder)
    return model.eval()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, lr: float) -> float:
    """One step of an optimizer; the norm of the gradient."""
    optimizer.zero_grad()
    (loss * dist.get_world_size()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return norm.item()


def main(checkpoint: Path, options: dict[str, Any], seeds: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config: Any = AutoConfig.from_pretrained(checkpoint / "policy" / "actor")
    actor = shard(AutoModelForCausalLM.from_config(config), checkpoint / "policy" / "actor")
    critic = shard(ValueModel(config), checkpoint / "policy" / "critic")
    reference = whole(AutoModelForCausalLM.from_config(config), checkpoint / "policy" / "reference")
    tokenizer = character_tokenizer(options["phrases"])
    actor_optimizer = torch.optim.AdamW(actor.parameters(), weight_decay=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), weight_decay=0.0)
    generator = torch.Generator()
    task = Task(options["task"], options["task_options"], seed=options["seed"])
    task.position = json.loads((checkpoint / "progress.json").read_text())["position"]
    scorer: Callable[..., float] = reasoning_gym.get_score_answer_fn(options["task"])
    parts = [module for module in actor.modules() if isinstance(module, FSDPModule)]

    def say(told: dict[str, float]) -> None:
        if rank == 0:
            print(json.dumps(told), flush=True)

    say({})
    for step in range(1, options["steps"] + 1):
        if rank == 0:
            sys.stdin.readline()  # it is told to go on
        dist.barrier()
        began = time.perf_counter()
        size = options["batch"] // world
        problems = task.draw(options["batch"])[rank * size : (rank + 1) * size]

        prompts = tokenizer.prompts(problems.questions, torch.device("cpu"))
        width = torch.tensor(prompts.tokens.shape[1])
        dist.all_reduce(width, dist.ReduceOp.MAX)
        missing = int(width) - prompts.tokens.shape[1]
        prompts = Padded(
            pad(prompts.tokens, (missing, 0), value=tokenizer.pad), pad(prompts.mask, (missing, 0), value=False)
        )
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
        responses = generate(
            actor,
            prompts,
            max_new_tokens=options["longest"],
            ends=tokenizer.ends,
            pad=tokenizer.pad,
            generator=generator.manual_seed((seeds[rank] + step) % (1 << 63)),
        )
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not actor, recurse=False)
        rollout: Rollout = join(prompts, responses, problems, tokenizer.texts(responses))
        scores = torch.tensor(
            [scorer(answer, problem.entry) for answer, problem in zip(rollout["answers"], problems, strict=True)]
        )

        mask, tokens, attention = rollout["mask"], rollout["tokens"], rollout["attention"]
        length = mask.shape[1]
        with torch.no_grad():
            old = response_log_probs(actor, rollout, 1.0)
            other = response_log_probs(reference, rollout, 1.0)
            values = response_values(critic, tokens, attention, length)
        kl = maths.kl_estimate(old, other, "k1")
        rewards = maths.token_rewards(scores, kl, mask, 0.01)
        raw, returns = maths.gae(rewards, values, mask, 1.0, 0.95)
        advantages = maths.whiten(raw, mask, total)
        row = {"reward": total(scores.mean()).item() / world}
        row["kl"] = total(maths.token_mean(kl, mask, total(mask.sum()))).item()

        batches = minibatches([size] * world, rank, options["minibatch"], 1)
        losses = []
        for chosen in batches:
            count = total(mask[chosen].sum())
            now = response_values(critic, tokens[chosen], attention[chosen], length)
            each = maths.value_loss(now, values[chosen], returns[chosen], 0.5)
            loss = maths.token_mean(each, mask[chosen], count)
            update(critic, critic_optimizer, loss, options["critic_lr"])
            losses.append(loss.item())
        row["value_loss"] = sum(losses) / len(losses)

        ramp = min(1.0, step / options["actor_ramp"], (options["steps"] - step + 1) / (0.5 * options["steps"]))
        losses = []
        for chosen in batches:
            count = total(mask[chosen].sum())
            logits = response_logits(actor, tokens[chosen], attention[chosen], length)
            log_probs = maths.token_log_probs(logits, tokens[chosen][:, -length:])
            each, clipped = maths.policy_loss(log_probs, old[chosen], advantages[chosen], 0.2)
            loss = maths.token_mean(each, mask[chosen], count)
            entropy = maths.token_mean(maths.entropy(logits), mask[chosen], count)
            fraction = maths.token_mean(clipped.float(), mask[chosen], count)
            update(actor, actor_optimizer, loss - 0.0 * entropy, options["actor_lr"] * ramp)
            losses.append(loss.item())
            entropy.item(), fraction.item()
        row["policy_loss"] = sum(losses) / len(losses)
        for name in ("value_loss", "policy_loss"):
            row[name] = total(torch.tensor(row[name])).item()
        say({"seconds": time.perf_counter() - began, **row})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))

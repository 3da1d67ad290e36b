"""Sampling and rewards of the demo's trainers, which replace verl's vLLM servers, agent loops and reward workers.

Answers are sampled on the driver, with weights that the actor's workers have written to a file. This needs neither Ray
nor an accelerator.
"""

# Types are checked without verl installed.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl.workers.rollout.base
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils import tensordict_utils as tu

RESPONSE = 12
"""Tokens of each answer."""
ABOUT = ("data_source", "reward_model", "extra_info")
"""Columns of a question that the reward function gets, in addition to the answer."""


class Rollout(verl.workers.rollout.base.BaseRollout):  # type: ignore[misc]
    """The rollout object in verl's workers. The first rank writes the actor's new weights to a file."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing, because there is no engine that holds memory."""

    release = resume

    async def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        """Gather the weights on all ranks, and write a file on the first rank."""
        whole = {name: tensor.cpu().clone() for name, tensor in weights}
        if torch.distributed.get_rank() == 0:
            torch.save(whole, self.config.custom["weights"])


verl.workers.rollout.base._ROLLOUT_REGISTRY["demo", "async"] = f"{__name__}.{Rollout.__name__}"


class Servers:
    """Replaces verl's `LLMServerManager`, and starts no servers."""

    @classmethod
    def create(cls, **_: Any) -> Servers:
        """Return an object without servers."""
        return cls()

    def get_client(self) -> None:
        """Return None, because `Answers` needs no client."""

    def get_replicas(self) -> list[Any]:
        """Return an empty list, because there are no replicas to update."""
        return []


class Rewards:
    """Replaces verl's `RewardLoopManager`, and has no workers, because answers already have rewards."""

    def __init__(self, config: Any, rm_resource_pool: Any = None) -> None:
        self.reward_loop_workers: list[Any] = []
        self.reward_loop_worker_handles: list[Any] = []


class Answers:
    """Replaces verl's `AgentLoopManager`: samples an answer to each prompt and computes the reward.

    The reward is the config's `reward.custom_reward_function`, or else the share of digits.
    """

    def __init__(self, config: Any) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.folder, self.times = Path(config.actor_rollout_ref.model.path), config.actor_rollout_ref.rollout.n
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, attn_implementation="sdpa")
        self.digits = torch.tensor(self.tokenizer.convert_tokens_to_ids(list("0123456789")))
        self.weights = Path(config.actor_rollout_ref.rollout.custom["weights"])
        self.reward = get_custom_reward_fn(config)

    @classmethod
    def create(cls, config: Any, **_: Any) -> Answers:
        """Construct an `Answers`; verl's V0 trainer calls this."""
        return cls(config)

    @torch.no_grad()
    def answer(self, step: int, messages: Any, about: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Sample an answer of fixed length to each prompt; prompts are padded on the left.

        The step is the random seed, so that a resumed run draws the answers of an uninterrupted run.
        """
        generator = torch.Generator().manual_seed(step)
        self.model.load_state_dict(torch.load(self.weights))
        texts = [
            self.tokenizer.apply_chat_template(list(row), tokenize=False, add_generation_prompt=True)
            for row in messages
        ]
        prompts = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        tokens, mask = prompts["input_ids"], prompts["attention_mask"]
        width = tokens.shape[1]
        for _ in range(RESPONSE):
            places = (mask.cumsum(1) - 1).clamp(min=0)
            logits = self.model(input_ids=tokens, attention_mask=mask, position_ids=places).logits[:, -1]
            new = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens, mask = torch.cat([tokens, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
        responses = tokens[:, width:]
        reward = torch.zeros(responses.shape)
        reward[:, -1] = self._compute_scores(responses, about)
        return {
            "prompts": tokens[:, :width],
            "responses": responses,
            "response_mask": torch.ones_like(responses),
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "rm_scores": reward,
        }

    def _compute_scores(self, responses: torch.Tensor, about: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        if self.reward is None:
            return torch.isin(responses, self.digits).float().mean(1)
        scores: list[float] = []
        for row, item in zip(responses, about, strict=True):
            score: Any = self.reward(
                data_source=item["data_source"],
                solution_str=self.tokenizer.decode(row, skip_special_tokens=True),
                ground_truth=item["reward_model"]["ground_truth"],
                extra_info=item["extra_info"],
            )
            scores.append(float(score["score"] if isinstance(score, dict) else score))
        return torch.tensor(scores)

    def _question_facts(self, batch: Any) -> list[dict[str, Any]]:
        columns = [batch[name] for name in ABOUT] if self.reward else []
        return [dict(zip(ABOUT, row, strict=True)) for row in zip(*columns, strict=True)]

    def generate_sequences(self, batch: Any) -> Any:
        """Answer a batch; return the answers to trainer V0, or put the answers into the TransferQueue for V1."""
        return self._to_v0(batch) if isinstance(batch, DataProto) else self._to_v1(batch)

    def _to_v0(self, batch: DataProto) -> DataProto:
        rows, step = batch.non_tensor_batch, batch.meta_info["global_steps"]
        answers = self.answer(step, rows["raw_prompt"], self._question_facts(rows))
        nothing = np.array([{} for _ in range(len(batch))], dtype=object)
        extras = {"multi_modal_inputs": nothing, "__num_turns__": np.full(len(batch), 2, dtype=np.int32)}
        return DataProto(TensorDict(answers, batch_size=len(batch)), extras, {"timing": {}, "reward_extra_keys": []})

    def _to_v1(self, batch: TensorDict) -> None:
        import transfer_queue as tq

        uids, step = list(batch["uid"]), tu.get(batch, "global_steps")
        about = [item for item in self._question_facts(batch) for _ in range(self.times)]
        answers = self.answer(step, [row for row in batch["raw_prompt"] for _ in range(self.times)], about)
        of_each = {"num_turns": 2, "multi_modal_inputs": {}}
        versions = {"global_steps": step, "min_global_steps": step - 1, "max_global_steps": step - 1}
        rows, keys, tags = [], [], []
        for index, uid in enumerate(uid for uid in uids for _ in range(self.times)):
            row = {name: answers[name][index] for name in ("responses", "response_mask", "rm_scores")}
            real = answers["attention_mask"][index].bool()
            row |= {name: answers[name][index][real] for name in ("input_ids", "position_ids")}
            row |= {"prompts": row["input_ids"][:-RESPONSE], "loss_mask": row["response_mask"]}
            rows.append(row | {"uid": uid} | of_each)
            keys.append(f"{uid}_{index % self.times}_0")
            lengths = {"prompt_len": len(row["prompts"]), "response_len": RESPONSE, "seq_len": len(row["input_ids"])}
            tags.append({"status": "success", **versions, **lengths})
        tq.kv_batch_put(keys=keys, partition_id="train", fields=tu.list_of_dict_to_tensordict(rows), tags=tags)
        finished = [{"is_prompt": True, "status": "finished", "global_steps": step}] * len(uids)
        tq.kv_batch_put(keys=uids, partition_id="train", tags=finished)

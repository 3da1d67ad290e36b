"""Make the inputs of the demo's trainers: a tiny model, a tokenizer, questions, and verl's config."""

# Types are checked without verl installed.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colocate import ConfigError

RANKS = 2
PROMPTS = 8
TIMES = 2
"""Answers to each prompt."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def make(folder: Path, steps: int) -> None:
    """Write models, a tokenizer, and sums as training data, with fixed random seeds."""
    import pandas
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedTokenizerFast, Qwen2Config

    characters = ["<pad>", "<end>", "<unk>", "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast  # Typed Any, because the constructor's signature has no types.
    tokenizer = fast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    )
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = Qwen2Config(vocab_size=len(characters), num_key_value_heads=2, **shape)
    torch.manual_seed(0)
    kinds: dict[str, Any] = {"actor": AutoModelForCausalLM, "critic": AutoModelForTokenClassification}
    for name, kind in kinds.items():
        config.num_labels = 1
        kind.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    sums = [(f"{i % 10}+{i // 10 % 10}=", str(i % 10 + i // 10 % 10)) for i in range(PROMPTS * (steps + 1))]
    truths = [{"style": "rule", "ground_truth": answer} for _, answer in sums]
    prompts = [[{"role": "user", "content": question}] for question, _ in sums]
    answers = [
        [*prompt, {"role": "assistant", "content": answer}] for prompt, (_, answer) in zip(prompts, sums, strict=True)
    ]
    extra = [{"index": index} for index in range(len(sums))]
    questions = {"prompt": prompts, "data_source": "sums", "reward_model": truths, "extra_info": extra}
    pandas.DataFrame(questions).to_parquet(folder / "ppo.parquet")
    pandas.DataFrame({"messages": answers}).to_parquet(folder / "sft.parquet")


def settings(trainer: str, folder: Path, steps: int, changes: Mapping[str, Any] | None = None) -> Any:
    """Return verl's config for a trainer: verl's defaults, then values for a tiny model, then your changes.

    Args:
        trainer: "v0", "v1" or "sft".
        folder: The folder with the models and data of `make`. Checkpoints go there, too, unless changed.
        steps: Number of training steps.
        changes: Values by verl's own keys, such as `{"data.train_batch_size": 64}`. A key that verl's config lacks
            begins with "+".

    Raises:
        ConfigError: verl has no such key, or refuses the value.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException

    both = {
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": RANKS,
        "trainer.total_training_steps": steps,
        "trainer.logger": "[file]",
        "trainer.default_local_dir": folder / "checkpoints",
        "data.train_batch_size": PROMPTS,
    }
    fp32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"

    def model(where: str, name: str) -> dict[str, Any]:
        return {
            f"{where}.path": folder / name,
            f"{where}.use_remove_padding": False,  # Removing padding would need flash attention.
            f"{where}.enable_gradient_checkpointing": False,
            f"+{where}.override_config.attn_implementation": "sdpa",
        }

    def engine(where: str) -> dict[str, Any]:
        return {f"{where}.strategy": "fsdp2", f"{where}.use_torch_compile": False, f"+{where}.mixed_precision": fp32}

    if trainer == "sft":
        name = "sft_trainer_engine"
        both |= {
            "data.train_files": folder / "sft.parquet",
            "data.use_dynamic_bsz": False,
            "data.max_length": 32,
            "trainer.save_freq": 1,
            **model("model", "actor"),
            **engine("engine"),
        }
    else:
        name, actor = "ppo_trainer", "actor_rollout_ref"
        both |= {
            "data.train_files": folder / "ppo.parquet",
            "data.val_files": folder / "ppo.parquet",
            "data.shuffle": False,
            "data.dataloader_num_workers": 0,
            "trainer.use_v1": trainer == "v1",
            "trainer.val_before_train": False,
            "algorithm.adv_estimator": "gae",
            f"{actor}.model.external_lib": "colocate_verl.demo.rollout",
            f"{actor}.rollout.name": "demo",
            f"{actor}.rollout.n": TIMES,
            f"{actor}.rollout.tensor_model_parallel_size": 1,
            f"{actor}.rollout.calculate_log_probs": False,
            f"{actor}.rollout.log_prob_micro_batch_size_per_gpu": 4,
            f"+{actor}.rollout.custom.weights": folder / "actor.pt",
            f"+{actor}.rollout.agent.agent_loop_manager_class": "colocate_verl.demo.rollout.Answers",
            f"{actor}.ref.log_prob_micro_batch_size_per_gpu": 4,
            f"{actor}.actor.use_kl_loss": True,
            f"{actor}.actor.optim.lr": 1e-3,
            f"{actor}.actor.ppo_mini_batch_size": PROMPTS // 2,
            f"{actor}.actor.ppo_micro_batch_size_per_gpu": 4,
            "critic.ppo_micro_batch_size_per_gpu": 4,
            f"{actor}.actor.strategy": "fsdp2",
            "critic.strategy": "fsdp2",
            **model(f"{actor}.model", "actor"),
            **model("critic.model", "critic"),
            **engine(f"{actor}.actor.fsdp_config"),
            **engine(f"{actor}.ref.fsdp_config"),
            **engine("critic.fsdp"),
        }
    prefixed = {key.lstrip("+"): key for key in both}  # A "+" marks a key that verl's config lacks.
    values = both | {prefixed.get(key, key): value for key, value in (changes or {}).items()}
    with initialize_config_module("verl.trainer.config", version_base=None):
        try:
            return compose(name, overrides=[f"{key}={value}" for key, value in values.items()])
        except HydraException as error:
            raise ConfigError(f"verl's config {name!r} can't be changed so: {error}") from error

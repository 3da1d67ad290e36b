"""The networks: a causal language model for policy and reference, and a backbone with one output for the critic.

Functions import transformers only when they build a model, because the import takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from colocate import ConfigError
from colocate_ppo.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Weights(TypedDict):
    """A language model as plain data: the config's fields (`config`), and the weights by name (`state`)."""

    config: dict[str, Any]
    state: dict[str, Tensor]


def make_small_llama(tokenizer: Tokenizer, layers: int, hidden: int, heads: int, feed_forward: int) -> PreTrainedConfig:
    """Return the config of a small Llama for the tokens of a tokenizer."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=tokenizer.size,
        pad_token_id=tokenizer.pad,
        eos_token_id=tokenizer.ends[0],
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=feed_forward,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def make_scratch_model(config: PreTrainedConfig, generator: torch.Generator, device: torch.device) -> PreTrainedModel:
    """Build a causal language model with random weights drawn from `generator`."""
    from transformers import AutoModelForCausalLM

    model = _make_empty(AutoModelForCausalLM, config)
    with torch.no_grad():
        for parameter in () if device.type == "meta" else model.parameters():
            if parameter.ndim > 1:  # Parameters with one dimension are norms (all ones) and biases (all zeros).
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device=generator.device))
                parameter.mul_(getattr(config, "initializer_range", 0.02))
    return _prepare_model(model, device)


def load_pretrained_model(name: str, device: torch.device) -> PreTrainedModel:
    """Load a causal language model in float32 from the hub or from a local folder."""
    from transformers import AutoModelForCausalLM

    # Without `trust_remote_code=False`, transformers asks on the terminal whether a model's own code may run.
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    return _prepare_model(AutoModelForCausalLM.from_pretrained(name, **options), device)


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the ids of the end tokens in a model's generation config.

    Raises:
        ConfigError: The generation config also ends answers by text.
    """
    config: Any = model.generation_config
    if config.stop_strings:
        raise ConfigError(
            f"the model's generation config has stop_strings={config.stop_strings!r}, and answers end by tokens: take "
            "these out of generation_config.json, and name tokens by `stop`"
        )
    ends = config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else [*ends]


def make_empty_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Build a causal language model for weights that are loaded later."""
    from transformers import AutoModelForCausalLM

    return _prepare_model(_make_empty(AutoModelForCausalLM, config), device)


class ValueModel(nn.Module):
    """The critic's network: a language model's backbone and a linear layer. The output is zero before training."""

    def __init__(self, config: PreTrainedConfig) -> None:
        from transformers import AutoModel

        super().__init__()
        self.config = config
        self.backbone = _make_empty(AutoModel, config)
        self.head = nn.Linear(config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)
        self.eval()

    def forward(self, **inputs: Any) -> Tensor:
        """Return the value of each position, `[B, L, 1]`."""
        values: Tensor = self.head(self.backbone(**inputs, use_cache=False).last_hidden_state)
        return values


def make_value_model(weights: Weights) -> ValueModel:
    """Build a value model from a copy of a language model's backbone."""
    model = ValueModel(make_config(weights["config"]))
    prefix = f"{model.backbone.base_model_prefix}."
    backbone = {name.removeprefix(prefix): t for name, t in weights["state"].items() if name.startswith(prefix)}
    model.backbone.load_state_dict(backbone)
    return model


def make_config(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """Rebuild a transformers config from the result of `to_dict`."""
    from transformers import AutoConfig

    options = dict(fields)
    return AutoConfig.for_model(options.pop("model_type"), **options)


def _make_empty(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = kind.from_config(config, trust_remote_code=False)
    return model


def _prepare_model(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    # Turn off dropout, because PPO compares log-probabilities from several passes with the same weights.
    nn.Module.to(model, device)
    model.train(False)
    return model

"""Models of transformers for engines: one by its name or config, or the one that another role has."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from colocate import ConfigError
from colocate_rollout.contract import Prompt, Row

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_IMPORTING = threading.Lock()


def imported() -> Any:
    """Return transformers, with what is used of it: two threads that import it at once find only parts."""
    with _IMPORTING:
        import transformers

        for name in ("AutoConfig", "AutoModelForCausalLM", "PreTrainedModel"):
            getattr(transformers, name)
    return transformers


def given_once(engine: str, model: object, role: object) -> None:
    """Refuse a model that is named twice, or not at all.

    Raises:
        ConfigError: It is.
    """
    if (model is None) == (role is None):
        raise ConfigError(
            f"engine {engine!r} needs either `model` (a folder, a hub id, or the fields of a config) or `role` (the "
            f"role whose model it is); it has {'neither' if model is None else 'both'}"
        )


def config_of(model: str | Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config of a folder or hub id, or what its fields say.

    Raises:
        ConfigError: There is no such model.
    """
    auto = imported().AutoConfig
    try:
        if isinstance(model, str):
            found: PreTrainedConfig = auto.from_pretrained(model, trust_remote_code=False)
            return found
        fields = dict(model)
        if "model_type" not in fields:
            raise ConfigError("model: the fields of a config have a model_type, as in config.json of a model's folder")
        made: PreTrainedConfig = auto.for_model(fields.pop("model_type"), **fields)
        return made
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"model={model!r} is no model of transformers: {str(error).splitlines()[0]}") from error


def model_in(role: object, name: str) -> PreTrainedModel:
    """Return the only causal language model among a role's attributes, also where DDP or the like is around it.

    Raises:
        ConfigError: There is none, or there are several.
    """
    kind: Any = imported().PreTrainedModel
    found: dict[int, PreTrainedModel] = {}
    for value in vars(role).values():
        inner: Any = value
        while inner is not None and not isinstance(inner, kind):
            # As DistributedDataParallel, torch.compile and classes of one's own have what they are around.
            known = vars(inner) if hasattr(inner, "__dict__") else {}
            modules = known.get("_modules", {}) if isinstance(inner, nn.Module) else known
            inner = modules.get("module", modules.get("_orig_mod"))
        if inner is not None and inner.can_generate():
            found[id(inner)] = inner
    if len(found) != 1:
        raise ConfigError(
            f"role {name!r} ({type(role).__qualname__}) has {len(found) or 'no'} causal language models of "
            "transformers in its attributes, and an engine that shares its model needs one"
        )
    return next(iter(found.values()))


def stop_ids(config: Any) -> frozenset[int]:
    """Return the tokens that end a response of a model."""
    found = config.get_text_config().eos_token_id
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


def check_prompts(prompts: Sequence[Prompt], vocabulary: int) -> None:
    """Refuse prompts that a model can't go on with.

    Args:
        prompts: What it is given.
        vocabulary: How many tokens it has.

    Raises:
        ConfigError: The first of them that is empty, or has other tokens.
    """
    for prompt in prompts:
        if not prompt.token_ids:
            raise ConfigError(f"prompt {prompt.index} is empty: it has at least one token")
        wrong = next((each for each in prompt.token_ids if not 0 <= each < vocabulary), None)
        if wrong is not None:
            raise ConfigError(f"prompt {prompt.index} has the token {wrong}, and the model has {vocabulary} tokens")


def with_room(prompts: Sequence[Prompt], longest: int) -> tuple[list[Prompt], list[Row]]:
    """Return the prompts that leave room for a response, and the rows of the others, whose response is empty.

    Args:
        prompts: All.
        longest: How many tokens prompt and response may have together.
    """
    full = [each for each in prompts if len(each.token_ids) >= longest]
    rows = [Row(each.index, sample, (), (), "length", ()) for each in full for sample in range(len(each.seeds))]
    return [each for each in prompts if len(each.token_ids) < longest], rows

"""Find and check an engine's transformers model, which is given by name, by config, or by another role's name."""

from __future__ import annotations

import contextlib
import os
import platform
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from colocate import ColocateError, ConfigError, Context
from colocate.signatures import brief
from colocate.texts import did_you_mean
from colocate_rollout.contract import Prompt, Row

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


_IMPORTING = threading.Lock()
_ASKS_S = 5.0


def import_transformers() -> Any:
    """Import transformers under a lock, because a second thread could see a half-imported module."""
    with _IMPORTING:
        import transformers

        for name in ("AutoConfig", "AutoModelForCausalLM", "CONFIG_MAPPING", "GenerationConfig", "PreTrainedModel"):
            getattr(transformers, name)
    return transformers


def check_model_options(engine: str, model: object, role: object) -> None:
    """Refuse options unless exactly one of `model` and `role` is set.

    Raises:
        ConfigError: Both or neither are set.
    """
    if (model is None) == (role is None):
        raise ConfigError(
            f"engine {engine!r} needs either `model` (a folder, a hub id, or the fields of a config) or `role` (the "
            f"role whose model it is); it has {'neither' if model is None else 'both'}"
        )


def loading_options(model: str) -> dict[str, Any]:
    """Return the options with which transformers loads a model from a folder or the hub.

    If the hub can't be reached, only earlier downloads are used, because transformers would retry for half a minute.

    Raises:
        ConfigError: There is no such folder; or the model was never downloaded, and the hub can't be reached.
    """
    if os.path.isdir(model):
        return {"trust_remote_code": False, "local_files_only": True}
    nowhere = f"model={model!r}: there is no such folder on node {platform.node()}"
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ConfigError(nowhere)
    if why := _describe_unreachable():
        import huggingface_hub

        if not isinstance(huggingface_hub.try_to_load_from_cache(model, "config.json"), str):
            raise ConfigError(f"{nowhere}, no model of this name was read there before, and {why}")
    return {"trust_remote_code": False, "local_files_only": why is not None}


def _describe_unreachable() -> str | None:
    """Return the reason why the Hugging Face hub can't be reached; None if the hub answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "the hub isn't asked, as HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_ASKS_S).close()
    except urllib.error.HTTPError:  # The hub is reachable, because an HTTP error is an answer.
        return None
    except OSError as error:
        why = getattr(error, "reason", error)
        # Ignore certificate errors, because the hub's own client may trust more certificates.
        return None if isinstance(why, ssl.SSLError) else f"the hub {constants.ENDPOINT} can't be reached ({why})"
    return None


def load_config(model: str | Mapping[str, Any], how: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Return the config of a folder or hub id, or build a config from fields.

    Args:
        model: The folder, the id or the fields.
        how: The result of `loading_options` for a folder or id, if already known.

    Raises:
        ConfigError: There is no such model, or it is no causal language model.
    """
    from huggingface_hub.errors import StrictDataclassError

    config: PreTrainedConfig
    try:
        if isinstance(model, str):
            config = import_transformers().AutoConfig.from_pretrained(model, **(how or loading_options(model)))
        else:
            config = _make_config(model)
    except (OSError, ValueError, StrictDataclassError) as error:
        if isinstance(error, ConfigError):
            raise
        why = str(error) if isinstance(error, StrictDataclassError) else str(error).partition("\n")[0]
        raise ConfigError(f"model={brief(repr(model))} is no model of transformers: {' '.join(why.split())}") from error
    if type(config) not in import_transformers().AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"model={brief(repr(model))} is no causal language model of transformers: its model_type is "
            f"{config.model_type!r}"
        )
    return config


def _make_config(fields: Mapping[str, Any]) -> PreTrainedConfig:
    kinds: Any = import_transformers().CONFIG_MAPPING
    options = dict(fields)
    kind = options.pop("model_type", None)
    if kind is None:
        raise ConfigError("model: the fields of a config have a model_type, as in config.json of a model's folder")
    if kind not in kinds:
        raise ConfigError(f"model: transformers has no model_type {kind!r}{did_you_mean(str(kind), kinds)}")
    config: PreTrainedConfig = kinds[kind](**options)
    return config


@contextlib.contextmanager
def borrow_role(ctx: Context, name: str, awake: Sequence[str]) -> Iterator[object]:
    """A context manager that borrows the role named by an engine's option `role`.

    Raises:
        ConfigError: There is no such role, or it can't be borrowed.
    """
    with contextlib.ExitStack() as stack:
        try:
            role = stack.enter_context(ctx.borrow(name, object, awake=awake))
        except ColocateError as error:
            if type(error) is not ColocateError:  # No config mistake: for example, the role sleeps.
                raise
            raise ConfigError(f"option `role: {name}`: {error.message}") from error
        yield role


def describe_model(ctx: Context, name: str) -> tuple[dict[str, Any], str]:
    """Return the config fields of a role's model, with the model's end tokens, and the model's dtype."""
    with borrow_role(ctx, name, ()) as role:
        module = find_model(role, name)
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        # FSDP2 and authors of roles derive classes from the model's class, so look for the first class of transformers.
        bases = type(_unwrap_adapters(module)).__mro__
        kind = next(base for base in bases if base.__module__.startswith("transformers."))
        ends = sorted(find_stop_ids(module.generation_config)) or None
        return {**module.config.to_dict(), "architectures": [kind.__name__], "eos_token_id": ends}, dtype


def find_model(role: object, name: str) -> PreTrainedModel:
    """Return the only causal language model among a role's attributes, unwrapped from DDP and similar wrappers.

    A model with PEFT adapters is returned as PEFT's model.

    Raises:
        ConfigError: There is no such model, or there are several.
    """
    from torch import nn

    kind: Any = import_transformers().PreTrainedModel
    models: dict[int, PreTrainedModel] = {}
    for value in vars(role).values():
        inner: Any = value
        while inner is not None and not isinstance(_unwrap_adapters(inner), kind):
            # DistributedDataParallel, torch.compile and users' wrappers store the model in `module` or `_orig_mod`.
            attributes = vars(inner) if hasattr(inner, "__dict__") else {}
            modules = attributes.get("_modules", {}) if isinstance(inner, nn.Module) else attributes
            inner = modules.get("module", modules.get("_orig_mod"))
        if inner is not None and _unwrap_adapters(inner).can_generate():
            models[id(inner)] = inner
    if len(models) != 1:
        raise ConfigError(
            f"role {name!r} ({type(role).__qualname__}) has {len(models) or 'no'} causal language models of "
            "transformers in its attributes, and an engine that shares its model needs one"
        )
    return next(iter(models.values()))


def _unwrap_adapters(value: Any) -> Any:
    """Return the model inside PEFT's wrapper, or any other value unchanged."""
    peft: Any = sys.modules.get("peft")  # If nothing has imported peft, no PEFT model exists.
    if peft is None or not isinstance(value, peft.PeftModel | peft.PeftMixedModel):
        return value
    inner = value.base_model  # With prompt learning, `base_model` is the model itself.
    return inner.model if hasattr(inner, "merge_and_unload") else inner


def load_generation_config(model: str | Mapping[str, Any], config: PreTrainedConfig) -> GenerationConfig:
    """Return a model's generation config, from the model's folder or else from the model's config.

    Args:
        model: The folder, the hub id or the fields of a config.
        config: The model's config (`load_config`).
    """
    kind: Any = import_transformers().GenerationConfig
    generation: GenerationConfig
    if not isinstance(model, str):
        generation = kind.from_model_config(config)
        return generation
    options = {"local_files_only": loading_options(model)["local_files_only"]}
    try:
        generation = kind.from_pretrained(model, **options)
    except OSError:  # The file is optional, so use the model's config, as transformers does.
        generation = kind.from_pretrained(model, config_file_name="config.json", _from_model_config=True, **options)
    return generation


def find_stop_ids(config: GenerationConfig) -> frozenset[int]:
    """Return the ids of the end tokens in a model's generation config.

    Args:
        config: The model's generation config.

    Raises:
        ConfigError: The generation config also ends responses by text.
    """
    if config.stop_strings:
        raise ConfigError(
            f"the model's generation config has stop_strings={config.stop_strings!r}, and engines end responses by "
            "tokens: take these out of generation_config.json, and name tokens in eos_token_id"
        )
    ends: int | list[int] | None = config.eos_token_id
    return frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)


def check_rope(config: Any, length: int, option: str) -> None:
    """Refuse a long-rope model if one row may be long enough to change all rows of a pass.

    Args:
        config: The model's config.
        length: Maximum tokens of prompt and response together.
        option: The option that sets `length`.

    Raises:
        ConfigError: The rotary embedding is long-rope, and rows may be longer than its first range.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [section for section in rope.values() if isinstance(section, Mapping)]
    lengths = [
        section["original_max_position_embeddings"] for section in kinds if section.get("rope_type") == "longrope"
    ]
    if lengths and length > min(lengths):
        raise ConfigError(
            f"the model's rotary embedding is long-rope, by which a row of more than {min(lengths)} tokens changes the "
            f"rows beside it, and rows may have {length}: {option}={min(lengths)} is as long as they may be"
        )


def check_prompts(prompts: Sequence[Prompt], vocabulary: int) -> None:
    """Refuse prompts that a model can't continue.

    Args:
        prompts: The prompts.
        vocabulary: The model's number of tokens.

    Raises:
        ConfigError: A prompt is empty, or has tokens unknown to the model.
    """
    for prompt in prompts:
        if not prompt.token_ids:
            raise ConfigError(f"prompt {prompt.index} is empty: it has at least one token")
        wrong = next((token for token in prompt.token_ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise ConfigError(f"prompt {prompt.index} has the token {wrong}, and the model has {vocabulary} tokens")


def split_by_room(prompts: Sequence[Prompt], longest: int) -> tuple[list[Prompt], list[Row]]:
    """Return the prompts that leave room for a response, and empty rows for all other prompts.

    Args:
        prompts: All prompts.
        longest: Maximum tokens of prompt and response together.
    """
    full = [prompt for prompt in prompts if len(prompt.token_ids) >= longest]
    rows = [Row(prompt.index, sample, (), (), "length", ()) for prompt in full for sample in range(len(prompt.seeds))]
    return [prompt for prompt in prompts if len(prompt.token_ids) < longest], rows

"""Use PEFT to merge a model's adapters into the weights, one layer at a time.

A layer with adapters gets a twin: the same classes and settings, with tensors of its own. PEFT merges the twin, and
the trained model stays as it is. A twin without memory (on the meta device) gives names, shapes and dtypes in advance,
and shows whether PEFT can merge the adapters at all.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from colocate.errors import ConfigError
from colocate.features.weights.weights import WeightSpec

Tensors = dict[str, torch.Tensor]
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that wrapping modules add to names."""


class MergedPart(NamedTuple):
    """A weight that is merged on demand.

    Attributes:
        layer: The layer of the weight.
        name: The weight's name in the layer that PEFT has wrapped.
        spec: The merged weight's shape and dtype.
    """

    layer: AdaptedLayer
    name: str
    spec: WeightSpec


def unwrap_name(name: str) -> str:
    """Return a weight's name without the prefixes that wrapping modules add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def merge_adapters(module: nn.Module) -> dict[str, torch.Tensor | MergedPart] | None:
    """Return a model's weights with adapters merged, under the names of the model that PEFT wraps.

    Returns:
        The weights by name, or None if the model has no adapters.

    Raises:
        ConfigError: PEFT can't merge the adapters, or the merged weights would differ from the model's computation.
    """
    if "peft" not in sys.modules:
        return None
    wraps = [*_find_wraps(module)]
    layers = {path: AdaptedLayer(path, layer) for path, layer in _outermost_layers(module)}
    if not wraps and not layers:
        return None
    weights: dict[str, torch.Tensor | MergedPart] = {}
    paths: set[str] = set()
    state = module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        name = unwrap_name(name)
        path = next((outer_path for outer_path in _outer_paths(name) if outer_path in layers), None)
        if path is None:
            if (called := _name_without_peft(name, wraps)) is not None:
                weights[called] = tensor
        elif path not in paths:
            paths.add(path)
            for part in layers[path].list_parts():
                called = _name_without_peft(f"{path}.{part.name}", wraps)
                if called is not None:
                    weights[called] = part
    if len({id(tensor) for tensor in state.values()}) < len(state):
        _check_tied(weights)
    return weights


def _import_peft() -> tuple[Any, Any]:
    return sys.modules["peft.tuners.tuners_utils"], sys.modules["peft.utils.other"]


def _layer_classes() -> tuple[type[nn.Module], ...]:
    tuners, other = _import_peft()
    return tuners.BaseTunerLayer, other.AuxiliaryTrainingWrapper


def _named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return (
        (unwrap_name(f"{path}.")[:-1], submodule) for path, submodule in module.named_modules(remove_duplicate=False)
    )


def _outer_paths(name: str) -> Iterator[str]:
    """Yield the paths of the modules that contain a weight, the outermost first."""
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)


def _outermost_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost layers with adapters, each with a path in the model."""
    kinds, layer_paths = _layer_classes(), set[str]()
    for path, submodule in _named_modules(module):
        if isinstance(submodule, kinds) and not any(above in layer_paths for above in _outer_paths(path)):
            layer_paths.add(path)
            yield path, submodule


def _find_wraps(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield, for each of PEFT's wrappers around models, the path to the wrapper and the prefix added to names.

    Raises:
        ConfigError: The adapters can't be merged into weights.
    """
    peft, (tuners, _) = cast("Any", sys.modules["peft"]), _import_peft()
    for path, wrapper in _named_modules(module):
        before = f"{path}." if path else ""
        if isinstance(wrapper, tuners.BaseTuner):
            if type(wrapper).__name__ == "XLoraModel":
                raise ConfigError(f"adapters of {path or 'the model'}: X-LoRA mixes them anew for each token{_ADVICE}")
            yield before, "model."
        elif isinstance(wrapper, peft.PeftModel | peft.PeftMixedModel):
            if not isinstance(wrapper.base_model, tuners.BaseTuner):
                configs = cast("Any", wrapper.peft_config).values()
                kind = " and ".join(sorted({str(config.peft_type.value) for config in configs}))
                raise ConfigError(
                    f"adapters of {path or 'the model'}: {kind} is nothing that weights can have{_ADVICE}"
                )
            yield before, "base_model."


_ADVICE = "; send the adapters alone (adapters='alone'), to a role that has such a model of PEFT's"


def _name_without_peft(name: str, wraps: list[tuple[str, str]]) -> str | None:
    """Return the name of a weight without PEFT's prefixes; None for a weight of PEFT's own."""
    for before, added in reversed(wraps):  # The innermost wrapper comes first.
        if name.startswith(before):
            if not name.startswith(before + added):
                return None
            name = before + name.removeprefix(before + added)
    return name


class AdaptedLayer:
    """The outermost PEFT wrapper around a layer of a model."""

    def __init__(self, path: str, layer: nn.Module) -> None:
        """Wrap a layer; `path` is the layer's path in the model."""
        self._path, self._layer = path, layer

    def list_parts(self) -> list[MergedPart]:
        """Return the names, shapes and dtypes of the merged weights.

        Raises:
            ConfigError: PEFT can't merge the adapters.
        """
        try:
            tensors = self._weights(_to_meta)
        except ConfigError:  # Some adapters, or PEFT's error texts, need tensors with memory.
            tensors = self._weights(_clone_tensor)
        return [
            MergedPart(self, name, WeightSpec(tuple(tensor.shape), tensor.dtype)) for name, tensor in tensors.items()
        ]

    def merged_weights(self) -> Tensors:
        """Return the layer's weights with the adapters merged. Without active adapters, return the model's own tensors.

        Shards are gathered, so all ranks must call this.

        Raises:
            ConfigError: PEFT can't merge the adapters.
        """
        return self._weights(_clone_tensor)

    def base_weights(self) -> Tensors:
        """Return the layer's tensors without adapters, as in the original model."""
        layer = _copy_module(self._layer, lambda tensor: tensor)
        return _state_tensors(getattr(layer, "original_module", None) or _unload_layer(layer, merge=False))

    def trained_addresses(self) -> set[int]:
        """Return the memory addresses of the layer's parameters that aren't the model's own tensors."""
        own_ids = {id(tensor) for tensor in self.base_weights().values()}
        return {_memory_address(tensor) for tensor in self._layer.parameters() if id(tensor) not in own_ids}

    def _weights(self, place: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
        self._check_mergeable()
        merges = any(self._needs_merge(tuned_layer) for tuned_layer in self._tuned_layers())
        layer = _copy_module(self._layer, place if merges or place is _to_meta else _keep_tensor)
        try:
            with torch.no_grad():
                bare = _unload_layer(layer, merge=merges)
        except Exception as error:
            raise self._refusal_error(f"PEFT can't merge them: {type(error).__name__}: {error}") from error
        return _state_tensors(bare)

    def _tuned_layers(self) -> Iterator[Any]:
        tuners, _ = _import_peft()
        return (submodule for submodule in self._layer.modules() if isinstance(submodule, tuners.BaseTunerLayer))

    def _needs_merge(self, layer: Any) -> bool:
        return bool(layer._get_available_adapters() & {*layer.active_adapters} - {*layer.merged_adapters})

    def _check_mergeable(self) -> None:
        """Refuse adapters if the merged weights would compute something else than the model.

        Raises:
            ConfigError: Adapters are disabled, merged and active adapters differ, or weights are quantized.
        """
        tuners, _ = _import_peft()
        for submodule in self._layer.modules():
            if isinstance(submodule, _layer_classes()) and getattr(submodule, "disable_adapters", False):
                raise self._refusal_error(
                    "they are disabled, and the model computes without them: enable them before the sync"
                )
        for layer in self._tuned_layers():
            available = layer._get_available_adapters()
            done, active = available & {*layer.merged_adapters}, available & {*layer.active_adapters}
            if done and done != active:
                raise self._refusal_error(
                    f"merged are {', '.join(sorted(done))}, and active are {', '.join(sorted(active)) or 'none'}: call "
                    "unmerge_adapter before the sync"
                )
            if isinstance(layer.base_layer, tuners.BaseTunerLayer) and not hasattr(
                layer, "unload_and_optionally_merge_module"
            ):
                raise self._refusal_error("there are adapters around adapters, of several kinds")
        for name, tensor in self._layer.named_parameters():
            if not tensor.is_floating_point() or not _is_plain(tensor):
                kind = type(tensor.data).__name__
                raise self._refusal_error(f"{name} is quantized ({kind} of {str(tensor.dtype).removeprefix('torch.')})")

    def _refusal_error(self, why: str) -> ConfigError:
        return ConfigError(f"adapters of {self._path} ({_class_name(self._layer)}): {why}")


def _class_name(layer: nn.Module) -> str:
    """Return the name of a layer's class in PEFT's own style, such as `lora.Linear`."""
    cls = next(
        (base_class for base_class in type(layer).__mro__ if base_class.__module__.startswith("peft.")), type(layer)
    )
    words = cls.__module__.split(".")
    return f"{words[2]}.{cls.__name__}" if words[1:2] == ["tuners"] else cls.__name__


def _check_tied(found: Mapping[str, torch.Tensor | MergedPart]) -> None:
    """Refuse tied weights (of a head and embeddings, for example) that become different through adapters.

    A target with the same config has one weight for both, so the later one would overwrite the earlier one.

    Raises:
        ConfigError: There are such weights.
    """
    before: dict[int, list[tuple[str, torch.Tensor | MergedPart]]] = {}
    origins: dict[AdaptedLayer, Tensors] = {}
    for name, weight in found.items():
        if isinstance(weight, MergedPart):
            if weight.layer not in origins:
                origins[weight.layer] = weight.layer.base_weights()
            origin = origins[weight.layer].get(weight.name)
        else:
            origin = weight
        if isinstance(origin, torch.Tensor):
            before.setdefault(id(origin), []).append((name, weight))
    for alike in before.values():
        layers = [weight.layer for _, weight in alike if isinstance(weight, MergedPart)]
        if len(alike) < 2 or not layers:
            continue
        if len(layers) < len(alike) or any(
            weight.trained_addresses() != layers[0].trained_addresses() for weight in layers
        ):
            names = " and ".join(name for name, _ in alike)
            raise ConfigError(
                f"adapters of {names}: these are one weight in the model that PEFT wraps, and with adapters they "
                "aren't. Load the model with tie_word_embeddings=False, or train with ensure_weight_tying=True"
            )


# -- twins


def _is_on_mesh(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor or _is_on_mesh(tensor)


def _memory_address(tensor: torch.Tensor) -> int:
    local: torch.Tensor = cast("Any", tensor).to_local() if _is_on_mesh(tensor) else tensor
    return local.untyped_storage().data_ptr()


def _keep_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a private copy of a tensor, with all shards gathered."""
    return cast("Any", tensor.detach()).full_tensor() if _is_on_mesh(tensor) else tensor.detach().clone()


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _copy_module(module: nn.Module, place: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a module of the same class and settings, with tensors converted by `place`. Tied tensors stay tied."""
    copies: dict[int, Any] = {}

    def placed(value: Any) -> Any:
        if id(value) not in copies:
            new = place(value)
            if isinstance(value, nn.Parameter) and not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, requires_grad=False)
            copies[id(value)] = new
        return copies[id(value)]

    def made(module: nn.Module) -> nn.Module:
        if id(module) in copies:
            return cast("nn.Module", copies[id(module)])
        twin: nn.Module = object.__new__(type(module))  # The classes of FSDP2 override `__new__`.
        copies[id(module)] = twin
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                value = OrderedDict()
            elif name == "_modules":
                value = {key: item and made(item) for key, item in value.items()}
            elif name in ("_parameters", "_buffers"):
                value = {key: item if item is None else placed(item) for key, item in value.items()}
            elif isinstance(value, torch.Tensor):
                value = placed(value)
            elif type(value) in (dict, list, set):
                value = value.copy()
            vars(twin)[name] = value
        return twin

    return made(module)


def _unload_layer(layer: nn.Module, merge: bool) -> nn.Module:
    """Return the layer inside PEFT's wrapper, with the adapters merged if `merge`."""
    any_layer: Any = layer
    if hasattr(any_layer, "unload_and_optionally_merge_module"):
        unloaded: nn.Module = any_layer.unload_and_optionally_merge_module(
            merge=merge, safe_merge=False, adapter_names=None
        )
        return unloaded
    if merge:
        any_layer.merge()
    bare: nn.Module = any_layer.get_base_layer()
    return bare


def _state_tensors(module: nn.Module) -> Tensors:
    items = module.state_dict(keep_vars=True).items()
    return {name: value for name, value in items if isinstance(value, torch.Tensor)}

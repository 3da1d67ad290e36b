"""Models are made without their weights: where they come from a hub their config is read, and of files nothing.

What a constructor reads from a file it may look at all the same: then that much is read.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

_MODELS = "transformers.modeling_utils"
_OF_HUBS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# What `from_pretrained` is told of how weights are read, and where they go. All else is the model's.
_OF_LOADING = (
    *(*_OF_HUBS, "variant", "trust_remote_code", "use_safetensors", "weights_only", "disable_mmap", "key_mapping"),
    *("ignore_mismatched_sizes", "device_map", "max_memory", "offload_folder", "offload_buffers", "offload_state_dict"),
    *("low_cpu_mem_usage", "device_mesh", "distributed_config", "tp_plan", "tp_size", "adapter_kwargs", "adapter_name"),
    *("use_kernels", "kernel_config", "fusion_config", "tqdm_class", "mirror", "from_tf", "from_flax", "_fast_init"),
    *("_from_auto", "_from_pipeline", "_commit_hash"),
)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Have `torch.load` map files, and `from_pretrained` of transformers make models of their configs."""
    finder, plain = _Finder(), torch.load
    sys.meta_path.insert(0, finder)
    if (models := sys.modules.get(_MODELS)) is not None:
        finder.patch(models)
    torch.load = _mapping(plain)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*copying from a non-meta parameter in the checkpoint to a meta parameter"
            )
            yield
    finally:
        torch.load = plain
        sys.meta_path.remove(finder)
        finder.undo()


def _mapping(load: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` that reads no more of a file than somebody looks at, where the file can be mapped."""

    @functools.wraps(load)
    def loading(f: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mmap") is None and isinstance(f, (str, os.PathLike)) and zipfile.is_zipfile(f):
            kwargs["mmap"] = True
        return load(f, *args, **kwargs)

    return loading


class _Finder:
    """Finds transformers' models when they are first wanted, so that nobody has to import them who wants none."""

    def __init__(self) -> None:
        self._models: Any = None
        self._plain: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As importlib asks."""
        spec = PathFinder.find_spec(name, path, target) if name == _MODELS else None
        if spec is None or spec.loader is None:
            return None
        executes = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            executes(module)
            self.patch(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def patch(self, models: Any) -> None:
        """Have models be made of their configs."""
        self._models, self._plain = models, vars(models.PreTrainedModel)["from_pretrained"]
        models.PreTrainedModel.from_pretrained = classmethod(_from_config)

    def undo(self) -> None:
        """Have them be made as they were."""
        if self._models is not None:
            self._models.PreTrainedModel.from_pretrained = self._plain


def _from_config(
    cls: Any,
    /,
    pretrained_model_name_or_path: Any,
    *args: Any,
    config: Any = None,
    dtype: Any = None,
    torch_dtype: Any = None,
    generation_config: Any = None,
    output_loading_info: bool = False,
    **options: Any,
) -> Any:
    """A model as `from_pretrained` gives it, without weights.

    Raises:
        ValueError: How large it is its config alone doesn't tell.
    """
    name, of_hub = pretrained_model_name_or_path, {key: options[key] for key in _OF_HUBS if key in options}
    if config is None or isinstance(config, (str, os.PathLike)):
        where = name if config is None else config
        config, options = cls.config_class.from_pretrained(where, return_unused_kwargs=True, **of_hub | options)
    config = copy.deepcopy(config)  # as `from_pretrained` does: what is made of it is noted in it
    config.name_or_path = name
    dtype = torch_dtype if dtype is None else dtype
    dtype = getattr(config, "dtype", None) if dtype in (None, "auto") else dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for what, is_so in {
        "of quantized weights": options.pop("quantization_config", None)
        or getattr(config, "quantization_config", None),
        "of weights in another form": options.pop("gguf_file", None) or options.pop("state_dict", None),
        "without a dtype in its config (give one)": not isinstance(dtype, torch.dtype),
        f"of {args!r}": args,
    }.items():
        if is_so:
            raise ValueError(f"how much {cls.__name__} holds {what} isn't known without its weights")
    own = {key: value for key, value in options.items() if key not in _OF_LOADING}
    model = cls._from_config(config, dtype=dtype, **own).eval()
    _keep_precise(model, dtype)
    if model.can_generate():
        if generation_config is None:
            with contextlib.suppress(OSError):  # there is none
                generation_config = type(model.generation_config).from_pretrained(name, **of_hub)
        model.generation_config = generation_config or model.generation_config
    told: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
    return (model, told) if output_loading_info else model


def _keep_precise(model: Any, dtype: torch.dtype) -> None:
    """Some models have parts that stay in another dtype, which `from_pretrained` sees to as it reads them."""
    for part, other in getattr(model, "_get_dtype_plan", lambda dtype: {})(dtype).items():
        pattern = re.compile(rf"(^|\.){part}($|\.)")
        for name, parameter in model.named_parameters():
            if pattern.search(name):
                parameter.data = parameter.data.to(other)

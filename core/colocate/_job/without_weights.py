"""Models are made without their weights: where they come from a hub their config is read, and of files nothing.

What a constructor reads from a file it may look at all the same: then that much is read.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

_MODELS = "transformers.modeling_utils"
# Options of `from_pretrained` that make another model; others are about where its weights are, and where they go.
_OF_MODELS = ("attn_implementation", "experts_implementation")
_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


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
    name: Any,
    *args: Any,
    config: Any = None,
    dtype: Any = None,
    torch_dtype: Any = None,
    output_loading_info: bool = False,
    quantization_config: Any = None,
    **options: Any,
) -> Any:
    """A model as `from_pretrained` gives it, without weights."""
    if config is None or isinstance(config, (str, os.PathLike)):
        where = name if config is None else config
        config, options = cls.config_class.from_pretrained(where, return_unused_kwargs=True, **options)
    if quantization_config is not None or getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"how much {cls.__name__} holds of quantized weights isn't known without them")
    own = list(inspect.signature(cls.__init__).parameters)[2:]
    wanted = {key: value for key, value in options.items() if key in (*own, *_OF_MODELS)}
    dtype = torch_dtype if dtype is None else dtype
    if dtype not in (None, "auto"):
        wanted["dtype"] = dtype
    # A copy, as `from_pretrained` makes one: what is made of it is noted in it.
    model = cls._from_config(copy.deepcopy(config), **dict(zip(own, args, strict=False)), **wanted).eval()
    return (model, {key: set() for key in _INFO}) if output_loading_info else model

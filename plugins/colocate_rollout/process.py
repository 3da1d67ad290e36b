"""What a library does to its whole process, and how that is undone: vLLM's patches, environment, groups, files.

vLLM takes a process for its own. In a worker there are other roles, whose code runs between the engine's steps: they
are to find torch, the environment and the garbage collector as these were.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy
import torch

_PATCHED = {
    "torch": ("set_num_threads", "Event"),
    "torch.cuda": ("Event", "Stream", "stream", "set_stream", "current_stream"),
    "torch.accelerator": ("synchronize", "empty_cache", "get_memory_info"),
    "torch.Tensor": ("pin_memory", "record_stream"),
    "sys": ("excepthook",),
}
"""What vLLM replaces, some of it as it is imported, some as an engine is made."""

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # as modules of vLLM are imported: a helper for log-probabilities takes seconds else
}
_MISSING = object()


def _owner(name: str) -> Any:
    return torch.Tensor if name == "torch.Tensor" else sys.modules[name]


def _names() -> dict[tuple[str, str], Any]:
    return {
        (owner, name): vars(_owner(owner)).get(name, _MISSING) for owner, names in _PATCHED.items() for name in names
    }


def _have(names: Mapping[tuple[str, str], Any]) -> None:
    for (owner, name), value in names.items():
        if value is not _MISSING:
            setattr(_owner(owner), name, value)
        elif name in vars(_owner(owner)):
            delattr(_owner(owner), name)


@attrs.define(eq=False)
class Guest:
    """An engine of vLLM's in a process that isn't its own.

    Attributes:
        environ: Variables that hold while the engine's code runs.
    """

    environ: dict[str, str] = attrs.field(factory=dict)
    _ours: dict[tuple[str, str], Any] = attrs.field(factory=_names)
    _theirs: dict[tuple[str, str], Any] = attrs.field(factory=dict)

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """A block in which vLLM is imported, and an engine made or ended: afterwards all is as before."""
        importlib.import_module("torch._dynamo")  # which remembers the variable as it is
        before = dict(os.environ)
        os.environ.update({**_VARIABLES, **self.environ})
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        level = logging.getLogger("vllm").level
        threads, randoms, arrays = torch.get_num_threads(), random.getstate(), numpy.random.get_state()
        frozen = gc.freeze
        gc.freeze = lambda: None
        try:
            with warnings.catch_warnings(), self.inside():
                warnings.simplefilter("ignore")
                yield
        finally:
            gc.freeze = frozen
            random.setstate(randoms)
            numpy.random.set_state(arrays)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            logging.getLogger("vllm").setLevel(level)
            os.environ.clear()
            os.environ.update(before)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """A block in which the engine's code runs: torch is as vLLM wants it to be, and then as before."""
        torch.get_num_threads()  # which, on a thread that has computed nothing yet, has OpenMP use as many, too
        with torch.random.fork_rng():  # a sampler draws for all rows, before it draws for those with a seed
            _have(self._theirs)
            try:
                yield
            finally:
                self._theirs = _names()
                _have(self._ours)

"""Isolate vLLM in a shared process by undoing the changes that vLLM makes to the process.

vLLM assumes a process of its own. A worker has other roles, whose code runs between the engine's steps and must find
torch, the environment and the garbage collector unchanged.
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
"""Names that vLLM replaces during an import or the construction of an engine."""

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM's modules read this at import. Otherwise they would compile a helper function, which takes seconds.
    "TORCHDYNAMO_DISABLE": "1",
}
_MISSING = object()


def _find_owner(name: str) -> Any:
    return torch.Tensor if name == "torch.Tensor" else sys.modules[name]


def _read_names() -> dict[tuple[str, str], Any]:
    return {
        (owner, name): vars(_find_owner(owner)).get(name, _MISSING)
        for owner, names in _PATCHED.items()
        for name in names
    }


def _set_names(names: Mapping[tuple[str, str], Any]) -> None:
    for (owner, name), value in names.items():
        if value is not _MISSING:
            setattr(_find_owner(owner), name, value)
        elif name in vars(_find_owner(owner)):
            delattr(_find_owner(owner), name)


@attrs.define(eq=False)
class Guest:
    """A guard that restores a shared process after a vLLM engine has used the process.

    Attributes:
        environ: Variables set while the engine's code runs.
    """

    environ: dict[str, str] = attrs.field(factory=dict)
    _own_values: dict[tuple[str, str], Any] = attrs.field(factory=_read_names)
    _engine_values: dict[tuple[str, str], Any] = attrs.field(factory=dict)

    @contextlib.contextmanager
    def create_engine(self) -> Iterator[None]:
        """A context manager for importing vLLM, and for making or ending an engine, that then restores the process."""
        # Import this module before the variables are set, so that the import reads the old TORCHDYNAMO_DISABLE.
        importlib.import_module("torch._dynamo")
        before = dict(os.environ)
        os.environ.update({**_VARIABLES, **self.environ})
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        level = logging.getLogger("vllm").level
        threads, randoms, arrays = torch.get_num_threads(), random.getstate(), numpy.random.get_state()
        frozen = gc.freeze
        gc.freeze = lambda: None
        try:
            with warnings.catch_warnings(), self.enter_engine():
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
    def enter_engine(self) -> Iterator[None]:
        """A context manager that applies vLLM's patches for the engine's code, then restores torch and the RNG."""
        torch.get_num_threads()  # On a new thread, this call makes OpenMP use torch's number of threads.
        with torch.random.fork_rng():  # vLLM's sampler draws from the global generator, even for rows with a seed.
            _set_names(self._engine_values)
            try:
                yield
            finally:
                self._engine_values = _read_names()
                _set_names(self._own_values)

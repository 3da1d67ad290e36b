"""Stands in for what plugins import and `pip install '.[docs]'` doesn't bring: the site needs their signatures only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = (
    *("torch", "numpy", "transformers", "tokenizers", "reasoning_gym", "ray", "distributed", "dask", "tornado"),
    *("tensorboard", "wandb", "mlflow", "requests", "prometheus_client", "opentelemetry"),
)


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing(metaclass=_Kind):
    """Whatever such a package has: a base, an annotation, a decorator that changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, decorated: Any = None, *args: Any, **kwargs: Any) -> Any:
        return decorated

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class _Module(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(_Nothing, name)


class _Finder:
    """Finds them last, where nothing else does."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in PACKAGES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> None:
    """Have what is absent be there, from now on."""
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]

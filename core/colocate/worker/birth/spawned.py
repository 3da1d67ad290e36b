"""Serves as `__main__` in processes that roles spawn by `multiprocessing`, where the driver's script is missing.

Such a process receives functions and classes of the script by name, and doesn't have the script. Python alone reports
nothing: a pool's process dies of the failed unpickling, and the pool starts another one, endlessly. So a name is
replaced by an object that raises when it is used, which becomes the error of that piece of work.
"""

from __future__ import annotations

import sys
from typing import Any

from colocate.errors import ColocateError

_GIVES_WORK = ("multiprocessing.queues", "multiprocessing.connection")


def __getattr__(name: str) -> Any:
    caller = sys._getframe(1).f_globals.get("__name__")
    if not name.startswith("__") and caller in _GIVES_WORK:
        return _Missing(name, (_Instance,), {})
    if not name.startswith("__") and caller == "multiprocessing.spawn":  # A starting process unpickles its target.
        raise _make_missing_error(name)
    raise AttributeError(f"module '__main__' has no attribute {name!r}")


def _make_missing_error(name: str) -> ColocateError:
    return ColocateError(
        f"{name!r} is defined in the driver's script, which a process that a role spawns by multiprocessing hasn't "
        'got: define it in a module, or start processes by fork, as in multiprocessing.get_context("fork")'
    )


class _Missing(type):
    """Placeholder for a function or class of the driver's script."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") in _GIVES_WORK:  # The instance is part of an unpickled value.
            return object.__new__(cls)  # type: ignore[arg-type]  # it is a class
        raise _make_missing_error(cls.__name__)


class _Instance:
    """Instance of a placeholder class. Pickle may create one, but any use raises an error."""

    def __new__(cls, *args: Any) -> _Instance:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        return

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of the script, which isn't here>"


def _refuse_use(self: object, *args: Any) -> Any:
    raise _make_missing_error(type(self).__name__)


for _name in ("getattr", "str", "bool", "len", "iter", "getitem", "contains", "call", "eq", "hash", "reduce_ex"):
    setattr(_Instance, f"__{_name}__", _refuse_use)

"""Bases and metaclasses that want to hear of a subclass: what is done about those that a worker has by import.

One that travelled itself has noted its subclasses where they were defined, and brings that along. One that was imported
knows of none, so it is told of each that is made here, when that is whole. The options of the class statement
(`class Grid(Env, id="grid")`) are kept nowhere: who needs some isn't told, and the driver warns of that.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from colocate._definitions.names import path_of

_OPTIONS = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANYTHING = inspect.signature(lambda *args, **options: None)


def tell(cls: type) -> None:
    """Have what was imported here, and wants to hear of a class, hear of it: without options, if it can do without.

    What it sets in the class has come with that, with what became of it since.
    """
    before = dict(vars(cls))
    owner = _teller(cls)
    if owner is not None and _can_do_without(hook := _hook(owner, cls)):
        hook()
    init = _initialiser(type(cls))
    if init is not None and _can_do_without(init, cls, "", (), {}):
        init(cls, cls.__name__, cls.__bases__, dict(before))
    for name, value in before.items():
        if vars(cls).get(name) is not value:
            type.__setattr__(cls, name, value)


def warn_of_untold(things: Iterable[Any]) -> None:
    """Warn of classes of which a base in the workers won't hear, or not as it did here."""
    for cls in things:
        if isinstance(cls, type) and (owner := _teller(cls)) is not None:
            hook = _hook(owner, cls)
            if not _can_do_without(hook) or (_has_options(hook) and _gives_options(cls)):
                _warn(cls, owner)


def _warn(cls: type, owner: type) -> None:
    base = f"{owner.__module__}.{owner.__qualname__}"
    text = (
        f"{cls.__qualname__} was defined with options for its base {base}, and these don't travel: the workers' base "
        "doesn't hear of the class, or hears of it without them. Define it in a module beside the script, which the "
        "workers import"
    )
    try:
        file, line = inspect.getsourcefile(cls) or cls.__module__, inspect.getsourcelines(cls)[1]
    except (OSError, TypeError, SystemError):  # a cell's
        file, line = cls.__module__, 1
    warnings.warn_explicit(text, RuntimeWarning, file, line)


def _teller(cls: type) -> type | None:
    """The nearest base with a hook for subclasses that an import leads to; the standard library's hear in any case."""
    for base in cls.__mro__[1:]:
        if "__init_subclass__" in vars(base) and (base is object or path_of(base) is not None):
            return None if _is_of_python(_function(base)) else base
    return None


def _initialiser(meta: type) -> Callable[..., None] | None:
    """What an imported metaclass does with a class when it is there."""
    owner = next(each for each in meta.__mro__ if "__init__" in vars(each))
    if owner is type or _is_of_python(owner) or path_of(owner) is None:
        return None
    init: Callable[..., None] = vars(owner)["__init__"]
    return init


def _is_of_python(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "builtins").partition(".")[0] in sys.stdlib_module_names


def _function(owner: type) -> Any:
    hook = vars(owner)["__init_subclass__"]
    return getattr(hook, "__func__", hook)


def _hook(owner: type, cls: type) -> Callable[..., Any]:
    hook: Callable[..., Any] = vars(owner)["__init_subclass__"].__get__(None, cls)
    return hook


def _can_do_without(hook: Callable[..., Any], *args: Any) -> bool:
    try:
        _signature(hook).bind(*args)
    except TypeError:
        return False
    return True


def _has_options(hook: Callable[..., Any]) -> bool:
    return any(each.kind in _OPTIONS for each in _signature(hook).parameters.values())


def _signature(hook: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(hook)
    except ValueError:  # it is compiled, and doesn't say
        return _ANYTHING


def _gives_options(cls: type) -> bool:
    """Whether a class's statement has options, as far as its source can be had."""
    try:
        statement = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError, SystemError):  # the last: Python 3.11's `ast` isn't for several threads
        return False
    return isinstance(statement, ast.ClassDef) and any(each.arg != "metaclass" for each in statement.keywords)

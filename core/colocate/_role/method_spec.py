"""`MethodSpec`: a role's method as it was declared."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import attrs

from colocate._values.collect import Collect
from colocate._values.dispatch import Dispatch, Scatter


@attrs.frozen(eq=False)
class MethodSpec:
    """A role method as declared."""

    name: str
    function: Callable[..., Any]
    dispatch: Dispatch
    collect: Collect
    signature: inspect.Signature
    is_async: bool
    concurrency: int
    readonly: tuple[str, ...]
    host: tuple[str, ...]
    awake: tuple[str, ...] | None = None
    simple: tuple[str, ...] | None = attrs.field(
        init=False, default=attrs.Factory(lambda self: _simple_names(self.signature), takes_self=True)
    )
    required: frozenset[str] = attrs.field(
        init=False, default=attrs.Factory(lambda self: _required_names(self.signature), takes_self=True)
    )
    padded: str | None = attrs.field(
        init=False, default=attrs.Factory(lambda self: _padded_parameter(self.dispatch), takes_self=True)
    )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name; TypeError as Python raises it when they don't fit."""
        names = self.simple
        if names is not None and len(args) <= len(names):
            bound = dict(zip(names, args, strict=False))
            if not kwargs or (kwargs.keys().isdisjoint(bound) and kwargs.keys() <= set(names)):
                bound.update(kwargs)
                if self.required <= bound.keys():
                    return bound
        try:
            found = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature}: {error}") from None
        return dict(found.arguments)

    def call(self, instance: object, arguments: dict[str, Any]) -> Any:
        """Run the function itself on an instance, with what `bind` made of the arguments."""
        if self.simple is not None:
            return self.function(instance, **arguments)
        bound = inspect.BoundArguments(self.signature, OrderedDict(arguments))
        return self.function(instance, *bound.args, **bound.kwargs)


def _padded_parameter(dispatch: Dispatch) -> str | None:
    """The parameter that decides how many rows the result has to have, where some of them may be padding."""
    return dispatch.parameters[0] if isinstance(dispatch, Scatter) and dispatch.pad is True else None


def _simple_names(signature: inspect.Signature) -> tuple[str, ...] | None:
    """The names of the parameters when all can be given by position and by name, otherwise None."""
    # Binding by hand is several times faster than Signature.bind and serves nearly every method.
    parameters = signature.parameters.values()
    if any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters)


def _required_names(signature: inspect.Signature) -> frozenset[str]:
    """The names of the parameters without a default."""
    return frozenset(p.name for p in signature.parameters.values() if p.default is inspect.Parameter.empty)

"""The declaration of a role's method (`MethodSpec`)."""

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
    """The declaration of a role's method: the function, dispatch, collect and options."""

    name: str
    function: Callable[..., Any]
    dispatch: Dispatch
    collect: Collect
    signature: inspect.Signature
    is_async: bool
    concurrency: int
    host: tuple[str, ...]
    awake: tuple[str, ...] | None = None
    shares: bool = False
    revives: bool = False
    rows: str | None = None
    """The parameter that takes one row, for a method with `rows=`."""
    yields: bool = False
    """Whether the method yields `(index, value)` of its rows."""
    feature: str | None = attrs.field(init=False)
    """The feature that runs the method's calls; None for plain calls."""
    simple: tuple[str, ...] | None = attrs.field(init=False)
    """Names of the parameters if all can be given by position and by name; otherwise None."""
    required: frozenset[str] = attrs.field(init=False)
    """Names of the parameters without a default."""
    padded: str | None = attrs.field(init=False)
    """The parameter that decides the number of result rows, if rows may be padding."""

    def __attrs_post_init__(self) -> None:
        # Binding by hand is several times faster than Signature.bind, and serves nearly every method.
        parameters = self.signature.parameters.values()
        is_simple = all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
        scatter = self.dispatch
        decided = {
            "feature": "rows" if self.rows is not None or self.yields else None,
            "simple": tuple(parameter.name for parameter in parameters) if is_simple else None,
            "required": frozenset(
                parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty
            ),
            "padded": scatter.parameters[0] if isinstance(scatter, Scatter) and scatter.pad is True else None,
        }
        for name, value in decided.items():
            object.__setattr__(self, name, value)  # A plain assignment fails, because the class is frozen.

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name; raise Python's TypeError for arguments that don't fit."""
        names = self.simple
        if names is not None and len(args) <= len(names):
            bound = dict(zip(names, args, strict=False))
            if not kwargs or (kwargs.keys().isdisjoint(bound) and kwargs.keys() <= set(names)):
                bound.update(kwargs)
                if self.required <= bound.keys():
                    return bound
        try:
            bound_arguments = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature}: {error}") from None
        return dict(bound_arguments.arguments)

    def call(self, instance: object, arguments: dict[str, Any]) -> Any:
        """Call the function on an instance, with the arguments from `bind`."""
        if self.simple is not None:
            return self.function(instance, **arguments)
        bound = inspect.BoundArguments(self.signature, OrderedDict(arguments))
        return self.function(instance, *bound.args, **bound.kwargs)


def no_such_attribute(label: str, name: str) -> AttributeError:
    """Return the error for an attribute that a view's method lacks, such as `stream`."""
    if name != "stream":
        return AttributeError(f"{label} has no attribute {name!r}: call it, or use .submit, .keep or .options")
    return AttributeError(
        f"{label} has no stream: its value comes at once. Methods with rows=..., and those with Scatter that yield "
        "(index, value), have one"
    )

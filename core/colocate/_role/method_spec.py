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
    host: tuple[str, ...]
    awake: tuple[str, ...] | None = None
    shares: bool = False
    revives: bool = False
    rows: str | None = None
    """The parameter that takes one row, of a method that the driver gives a list of them."""
    yields: bool = False
    """Whether it yields `(index, value)` of the rows that it has got."""
    feature: str | None = attrs.field(init=False)
    """The feature that runs its calls, where these aren't plain ones."""
    simple: tuple[str, ...] | None = attrs.field(init=False)
    """The names of the parameters when all can be given by position and by name, otherwise None."""
    required: frozenset[str] = attrs.field(init=False)
    """The names of the parameters without a default."""
    padded: str | None = attrs.field(init=False)
    """The parameter that decides how many rows the result has to have, where some of them may be padding."""

    def __attrs_post_init__(self) -> None:
        # Binding by hand is several times faster than Signature.bind and serves nearly every method.
        parameters = self.signature.parameters.values()
        is_simple = all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in parameters)
        scatter = self.dispatch
        decided = {
            "feature": "rows" if self.rows is not None or self.yields else None,
            "simple": tuple(each.name for each in parameters) if is_simple else None,
            "required": frozenset(each.name for each in parameters if each.default is inspect.Parameter.empty),
            "padded": scatter.parameters[0] if isinstance(scatter, Scatter) and scatter.pad is True else None,
        }
        for name, value in decided.items():
            object.__setattr__(self, name, value)  # it is frozen

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name; TypeError as Python raises it when they don't fit."""
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


def no_such_attribute(label: str, name: str) -> AttributeError:
    """The error of what a method of a view hasn't, such as the stream of one that has none."""
    if name != "stream":
        return AttributeError(f"{label} has no attribute {name!r}: call it, or use .submit, .keep or .options")
    return AttributeError(
        f"{label} has no stream: its value comes at once. Methods with rows=..., and those with Scatter that yield "
        "(index, value), have one"
    )

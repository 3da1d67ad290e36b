"""`OnDriver`: what means something on the driver only, and is refused elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from colocate._values.nesting import no_end, refuse_hidden
from colocate._values.tree import map_leaves


class OnDriver:
    """Base of what users hold on the driver: runtimes, pools, groups, views, calls, residents."""

    __slots__ = ()

    _instead: ClassVar[str] = "A role finds the others of its worker by ctx.sibling(name, cls)"
    """What to do where it was given to a role."""


def lives_on_driver(kind: type) -> bool:
    """Whether values of this type mean something on the driver only; of these, residents can be arguments."""
    return issubclass(kind, OnDriver)


def refuse_in_constructor(arguments: Mapping[str, Any], what: str) -> None:
    """Refuse what has no end, or lives on the driver, among the arguments of a role's constructor.

    Raises:
        SerializationError: There is such a thing, in whatever of its containers, sets and declared fields.
    """
    try:
        map_leaves(list(arguments.values()), lambda item: item, lambda kind: False)
    except RecursionError:
        if (error := no_end(arguments, what)) is not None:
            raise error from None
        raise
    refuse_hidden(arguments, what, lives_on_driver, _why_not_in_constructor, holder=what)


def _why_not_in_constructor(item: Any, holder: str) -> str:
    return f"which lives on the driver. {item._instead}"

"""Records: values of users' classes that have others as attributes.

Dataclasses, classes made by attrs, and `UserDict`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections import UserDict
from collections.abc import Callable
from typing import Any

import attrs

from colocate._system.by_type import by_type
from colocate._system.jobs import error_text


@by_type
def fields(kind: type) -> tuple[str, ...]:
    """The attributes in which a record has its values; none of other types."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if issubclass(kind, UserDict):
        return ("data",)
    return tuple(field.name for field in attrs.fields(kind)) if attrs.has(kind) else ()


@by_type
def slots(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """A type's slots, also private ones and those that a base has under the same name."""
    members = (member for base in kind.__mro__ if base is not object for member in vars(base).values())
    return tuple(member for member in members if isinstance(member, types.MemberDescriptorType))


class CopyError(Exception):
    """A record can't be copied, or the copy not be given other values."""


class Records:
    """Makes records anew in which something changes.

    Each once, so that two names of one stay two names of one; one that leads to itself does so again. Who uses them is
    no part of them: that would be a circle, which holds what was made until the garbage collector comes.
    """

    def __init__(self, by_itself: Callable[[Any], Any] | None = None) -> None:
        """Args: by_itself: Copies those for which it takes code of theirs; else they aren't copied."""
        self._by_itself = by_itself
        self._made: dict[int, tuple[Any, Any]] = {}  # by id, with what it is of; None while nothing else is needed

    def of(self, item: Any, change: Callable[[Any], Any], changes: Callable[[Any], bool]) -> Any:
        """What a record becomes: itself where nothing in it changes.

        Args:
            item: The record.
            change: What becomes of a field's value: the very object where nothing does.
            changes: Whether anything does in a record, which leads to itself.

        Raises:
            CopyError: It can't be copied. It stays as it is.
        """
        known, made = self._made.get(id(item), (None, None))
        if made is not None:
            return made
        if known is not None:  # this one leads to itself
            made = self._copy(item) if changes(item) else item
            self._made[id(item)] = item, made
            return made
        self._made[id(item)] = item, None
        try:
            made = self._record(item, change)
        except BaseException:
            made = item
            raise
        finally:
            self._made[id(item)] = item, made
        return made

    def _record(self, item: Any, change: Callable[[Any], Any]) -> Any:
        changed = {}
        for name in fields(type(item)):
            old = getattr(item, name, None)
            if (new := change(old)) is not old:
                changed[name] = new
        if not changed:
            return item
        _, made = self._made[id(item)]
        if made is None:
            made = self._copy(item)
        for name, new in changed.items():
            try:
                object.__setattr__(made, name, new)  # it may be frozen
            except AttributeError as error:
                raise CopyError(f"{name} can't be set") from error
        return made

    def _copy(self, item: Any) -> Any:
        """A copy with the same values, made without code of its own where that can be."""
        kind = type(item)
        try:
            made = object.__new__(kind)
        except TypeError as error:  # it is of a type that is made otherwise
            if self._by_itself is None:
                raise CopyError(str(error)) from error
            return self._copied_by_itself(item, self._by_itself)
        if hasattr(item, "__dict__"):
            vars(made).update(vars(item))
        for member in slots(kind):
            with contextlib.suppress(AttributeError):  # nothing is in it
                member.__set__(made, member.__get__(item))
        return made

    def _copied_by_itself(self, item: Any, by_itself: Callable[[Any], Any]) -> Any:
        try:
            made = by_itself(item)
        except Exception as error:
            raise CopyError(error_text(error)) from error
        if made is item:
            raise CopyError("its copy is itself")
        return made

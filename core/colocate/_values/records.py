"""Records: values of users' classes that have others as attributes.

Dataclasses, classes made by attrs, and `UserDict`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections import UserDict
from collections.abc import Callable, Mapping
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
    """Makes records anew in which something changes; no record itself is changed.

    Each once, so that two names of one stay two names of one; one that leads to itself does so again. Who uses them is
    no part of them: that would be a circle, which holds what was made until the garbage collector comes.
    """

    def __init__(self, by_itself: Callable[[Any], Any] | None = None) -> None:
        """Args: by_itself: Copies one in its own way, with code of its class; None: none of that is run."""
        self._by_itself = by_itself
        self._made: dict[int, tuple[Any, Any]] = {}  # by id, with what it is of; None while nothing else is needed
        self._inside: list[int] | None = None  # the outermost one's, and of all in it; None between two
        self._leads_back = self._copies_back = False

    def of(self, item: Any, change: Callable[[Any], Any]) -> Any:
        """What a record becomes: itself where nothing in it changes.

        Args:
            item: The record.
            change: What becomes of a field's value, the very object where nothing does; it comes back here for those
                in it.

        Raises:
            CopyError: It can't be copied. It stays as it is.
        """
        known, made = self._made.get(id(item), (None, None))
        if made is not None:
            return made
        if known is not None:
            return self._back(item)
        if self._inside is None:
            return self._outermost(item, change)
        self._inside.append(id(item))
        self._made[id(item)] = item, None
        made = item
        try:  # without another frame: records may be nested deep
            changed = {}
            for name in fields(type(item)):
                old = getattr(item, name, None)
                if (new := change(old)) is not old:
                    changed[name] = new
            copied = self._made[id(item)][1]
            if changed:
                if copied is None:
                    copied = self._copy(item)
                _have(copied, changed)
            made = item if copied is None else copied
        finally:
            self._made[id(item)] = item, made
        return made

    def _outermost(self, item: Any, change: Callable[[Any], Any]) -> Any:
        self._inside, self._leads_back, self._copies_back = [], False, False
        try:
            made = self.of(item, change)
            if self._leads_back and made is not item:  # all of it once more: what leads back leads to copies now
                for key in self._inside:
                    del self._made[key]
                self._inside, self._copies_back = [], True
                made = self.of(item, change)
            return made
        finally:
            self._inside = None

    def _back(self, item: Any) -> Any:
        """What one becomes in what it holds itself."""
        self._leads_back = True
        if not self._copies_back:
            return item
        made = self._copy(item)
        self._made[id(item)] = item, made
        return made

    def _copy(self, item: Any) -> Any:
        if self._by_itself is not None:
            try:
                made = self._by_itself(item)
            except Exception as error:
                raise CopyError(error_text(error)) from error
            if made is not item:
                return made
        kind = type(item)
        try:
            made = object.__new__(kind)
            if kind.__dictoffset__:
                vars(made).update(vars(item))
            for member in slots(kind):
                with contextlib.suppress(AttributeError):  # nothing is in it
                    member.__set__(made, member.__get__(item))
        except (AttributeError, TypeError) as error:  # it is of a type that is made otherwise
            raise CopyError(str(error)) from error
        return made


def _have(made: Any, changed: Mapping[str, Any]) -> None:
    for name, new in changed.items():
        try:
            object.__setattr__(made, name, new)  # it may be frozen
        except AttributeError as error:
            raise CopyError(f"{name} can't be set") from error

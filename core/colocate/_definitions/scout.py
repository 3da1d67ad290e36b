"""What pickling something meets, looked for before that is put into a lot."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from colocate._definitions.known import Definition, Need

if TYPE_CHECKING:
    from colocate._definitions.known import Space

_CODE = (type, FunctionType, BuiltinFunctionType, ModuleType, type(functools.lru_cache(maxsize=1)(len)))
_ATOMS = (type(None), bool, int, float, complex, str, bytes)


def is_code(value: Any) -> bool:
    """Whether nothing of the user's runs when this is rebuilt: it is code, or plain."""
    return isinstance(value, _CODE) or type(value) in _ATOMS


def code_last(needs: Iterable[Need]) -> list[Need]:
    """Some needs, of which the last comes first: what values may use when they are rebuilt is there before them."""
    return sorted(needs, key=lambda need: isinstance(need, Definition) or is_code(need.value))


class Scout:
    """In a lot's place: what has to be there before something is rebuilt.

    Attributes:
        met: The definitions in a value, and what code in it names; the classes in a definition.
    """

    def __init__(self, own: Definition | None = None) -> None:
        """Args: own: The definition that is rebuilt; None for a value."""
        self._own = own
        self.met: list[Need] = []

    def key_of(self, space: Space) -> str | int:
        """As a lot's."""
        return space.key

    def has_to_have(self, definition: Definition) -> bool:
        """Whether to look into a definition: defaults of functions, and what is in closures, are rebuilt with them."""
        if definition is self._own or (self._own is not None and not isinstance(definition.object, type)):
            return True
        self.met.append(definition)
        return False

    def will_need(self, found: Need) -> None:
        """Code names something: that of a definition doesn't run when it is rebuilt."""
        if self._own is None:
            self.met.append(found)

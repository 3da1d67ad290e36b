"""Convert values to message bodies and back, by value in the wire format or by reference within one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from colocate import wire
from colocate._definitions.packed import Plain, owned
from colocate._system.tracebacks import is_of_handler
from colocate._values.leaving import handed_over
from colocate._values.nesting import no_end
from colocate._values.plain import is_plain
from colocate.errors import SerializationError


@attrs.frozen
class Codec:
    """A pair of functions that convert a value to a message's body and back. `unpack` takes the receiver's device."""

    name: str
    pack: Callable[[Any], Any]
    unpack: Callable[[Any, str | None], Any]

    def pack_named(self, value: Any, name: str, what: str) -> Any:
        """Pack a value into a message's body.

        Raises:
            SerializationError: Packing failed; the message names the value, and the path to the culprit inside.
        """
        try:
            return self.pack(value)
        except Exception as error:
            if is_of_handler(error):
                raise
            raise explain(value, name, what, error) from error

    def pack_arguments(self, arguments: dict[str, Any], what: str) -> Any:
        """Pack a call's arguments into a message's body; return None without arguments.

        Raises:
            SerializationError: Packing failed; the message names the argument, and the path to the culprit inside.
        """
        if not arguments:
            return None
        try:
            return self.pack(arguments)
        except Exception as error:
            if is_of_handler(error):
                raise
            for name, value in arguments.items():
                try:
                    self.pack(value)
                except Exception as fault:
                    raise explain(value, name, what, fault) from fault
            raise explain(arguments, "arguments", what, error) from error


def explain(value: Any, name: str, what: str, error: Exception) -> SerializationError:
    """Return an error that names the part of a value that can't be sent."""
    if any(isinstance(cause, RecursionError) for cause in (error, error.__cause__)):
        return no_end(what, name)
    explanation = wire.explain(value, name, error)
    explanation.args = (f"{what}: {explanation.message}",)
    return explanation


def _handed_over(value: Any, device: str | None) -> Any:
    # Workers get arguments detached from autograd, because no graph may connect a role and the driver.
    if device is None:
        return value
    if type(value) is dict:
        return dict(value) if all(map(_holds_nothing, value.values())) else handed_over(value)
    return value if _holds_nothing(value) else handed_over(value)


def _holds_nothing(value: Any) -> bool:
    return is_plain(value) or issubclass(type(value), Plain)  # A `Plain` object represents a resident.


def _pack_copy(value: Any) -> Any:
    # Buffers are copied, because within one process the sender may overwrite the memory afterwards.
    return owned(wire.pack(value))


def _unpack_copy(body: Any, device: str | None) -> Any:
    return wire.unpack(body.copy(), device)  # Copied, so that ranks share no memory.


BY_VALUE = Codec("value", wire.pack, wire.unpack)
BY_REFERENCE = Codec("reference", lambda value: value, _handed_over)
STRICT = Codec("strict", _pack_copy, _unpack_copy)

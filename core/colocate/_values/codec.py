"""Convert values to message bodies and back, by value in the wire format or by reference within one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from colocate import wire
from colocate._definitions.packed import PlainData, copy_buffers
from colocate._system.tracebacks import is_of_handler
from colocate._values.leaving import hand_over_value
from colocate._values.nesting import find_nesting_error
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
            raise explain_unsendable(value, name, what, error) from error

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
                    raise explain_unsendable(value, name, what, fault) from fault
            raise explain_unsendable(arguments, "arguments", what, error) from error


def explain_unsendable(value: Any, name: str, what: str, error: Exception) -> SerializationError:
    """Return an error that names the part of a value that can't be sent."""
    if any(isinstance(cause, RecursionError) for cause in (error, error.__cause__)):
        return find_nesting_error(what, name)
    explanation = wire.explain(value, name, error)
    explanation.args = (f"{what}: {explanation.message}",)
    return explanation


def _hand_over(value: Any, device: str | None) -> Any:
    # Workers get arguments detached from autograd, because no graph may connect a role and the driver.
    if device is None:
        return value
    if type(value) is dict:
        return dict(value) if all(map(_holds_no_tensors, value.values())) else hand_over_value(value)
    return value if _holds_no_tensors(value) else hand_over_value(value)


def _holds_no_tensors(value: Any) -> bool:
    return is_plain(value) or issubclass(type(value), PlainData)  # A `PlainData` object only refers to a resident.


def _pack_copy(value: Any) -> Any:
    # Buffers are copied, because within one process the sender may overwrite the memory afterwards.
    return copy_buffers(wire.pack(value))


def _unpack_copy(body: Any, device: str | None) -> Any:
    return wire.unpack(body.copy(), device)  # Copied, so that ranks share no memory.


BY_VALUE = Codec("value", wire.pack, wire.unpack)
BY_REFERENCE = Codec("reference", lambda value: value, _hand_over)
STRICT = Codec("strict", _pack_copy, _unpack_copy)

"""What a driver and its proxy tell each other: the driver asks, the proxy answers, and says something by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from colocate._protocol.message import Message, message
from colocate.errors import ColocateError

PING = "ping"
"""Answered at once, whatever else goes on; of all requests the only one that a module has no method for."""
OPEN = "open"
"""Comes first, and is done on the main thread."""


@message
class ProxyDo(Message):
    """Do something; the body has the arguments. Answered by `ProxyDid`."""

    token: int  # the request's
    name: str  # the method


@message
class ProxyDid(Message):
    """It is done; the body has the result, or a `Failure`."""

    token: int  # the request's


@message
class ProxySaid(Message):
    """Something that nobody has asked for; the body has it."""


@attrs.frozen
class Failure:
    """An error on its way to the driver."""

    kind: type[ColocateError]
    message: str
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, error: BaseException, engine: str) -> Failure:
        """That of an error; of a cluster's own as text, as the driver may have nothing to unpickle it with."""
        if not isinstance(error, ColocateError):
            error = ColocateError(f"{engine} failed: {type(error).__name__}: {error}")
        return cls(type(error), error.message, dict(error.__dict__))

    def error(self) -> ColocateError:
        """Return the error."""
        return self.kind(self.message, **self.facts)

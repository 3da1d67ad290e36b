"""What the driver and its envoy tell each other; plain data. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from colocate.errors import ColocateError
from colocate.keeper import Message, message

# Requests that the envoy itself does; all others are what its side of Ray can do.
OPEN = "open"
PING = "ping"  # answered at once, whatever else goes on
HEAD = "check_head"  # of the others the one that takes a few seconds at most, whatever the cluster is up to


@message
class EnvoyDo(Message):
    """Do something; the body has the arguments. Answered by `EnvoyDid`.

    Attributes:
        token: The request's.
        name: What.
    """

    token: int
    name: str


@message
class EnvoyDid(Message):
    """It is done; the body has the result, or a `Failure`.

    Attributes:
        token: The request's.
    """

    token: int


@message
class EnvoyLost(Message):
    """An actor is gone; the body says which, and in Ray's words why."""


@attrs.frozen
class Cluster:
    """Which Ray to be in.

    Attributes:
        address: Of the cluster to join, "auto" for the one of this machine; None to start a private one.
        cpus: CPUs that a private one offers; None for this machine's.
        gpus: GPUs that a private one offers, by name and in the order of the ranks; None when it is to look itself, or
            isn't private.
        token_file: The file with the token of the cluster to join; None for what Ray's environment says.
        runtime_env: Ray's runtime environment of the actors.
    """

    address: str | None = None
    cpus: float | None = None
    gpus: tuple[str, ...] | None = None
    token_file: str | None = None
    runtime_env: Mapping[str, Any] | None = None

    @property
    def private(self) -> bool:
        """Whether it is started for this driver alone."""
        return self.address is None


@attrs.frozen
class Slot:
    """A slot that is held, as the envoy found it.

    Attributes:
        index: Which bundle of its placement group it is; the slots themselves are sorted by node and device.
        node: Name of the machine.
        devices: Indices of its GPUs.
        host: Address under which other workers reach the machine.
        address: That of its keeper.
    """

    index: int
    node: str
    devices: tuple[int, ...]
    host: str
    address: str


@attrs.frozen
class Failure:
    """An error on its way to the driver."""

    kind: type[ColocateError]
    message: str
    facts: Mapping[str, Any]

    def error(self) -> ColocateError:
        """The error."""
        return self.kind(self.message, **self.facts)

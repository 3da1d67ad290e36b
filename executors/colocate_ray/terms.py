"""What the driver and its envoy tell each other; plain data. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

HEAD = "check_head"  # of all requests the one that takes a few seconds at most, whatever the cluster is up to


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

"""Data that driver, envoy and Ray actors share: settings, slots, and certificates. Imports no Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from colocate.errors import ConfigError
from colocate.wire import Tls

_FILES = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
HEAD = "check_head"  # This request ends within a few seconds, whatever the state of the cluster.


@attrs.frozen
class Cluster:
    """The settings of the Ray to join or to start."""

    # Address of the cluster to join, or "auto" for this machine's cluster; None to start a private Ray.
    address: str | None = None
    cpus: float | None = None  # CPUs that a private Ray offers; None for all CPUs of this machine.
    # Names of the GPUs that a private Ray offers, in the order of ranks.
    # None lets Ray detect GPUs, and is also the value for a cluster to join.
    gpus: tuple[str, ...] | None = None
    # The file with the token of the cluster to join; None for the token in Ray's environment variables.
    token_file: str | None = None
    runtime_env: Mapping[str, Any] | None = None  # Ray's runtime environment for the actors.

    @property
    def private(self) -> bool:
        """Whether the Ray is started for this driver only."""
        return self.address is None


@attrs.frozen
class Slot:
    """A slot that the envoy has reserved, as described to the driver."""

    # Index of the bundle in the placement group. Lists of slots are sorted by node and device, not by index.
    index: int
    node: str
    devices: tuple[int, ...]  # Indices of the GPUs.
    host: str  # Address of the machine for workers on other machines.
    address: str  # Address of the keeper.


def tls_of_environment() -> Tls | None:
    """Return the certificates that Ray's environment variables name; None if Ray doesn't encrypt.

    Raises:
        ConfigError: A file is missing. The connection must not fall back to clear text.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("0", "false", ""):
        return None
    paths = {name: os.environ.get(name, "") for name in _FILES}
    missing = [f"{name}={path!r}" for name, path in paths.items() if not Path(path).is_file()]
    if missing:
        raise ConfigError(f"RAY_USE_TLS is set, but these name no file: {', '.join(missing)}")
    return Tls(*(Path(path).read_text() for path in paths.values()))

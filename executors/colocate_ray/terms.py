"""Common terms of driver, envoy and Ray actors: plain data, and certificates. Imports no Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from colocate.errors import ConfigError
from colocate.wire import Tls

_FILES = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
HEAD = "check_head"  # the one request that takes at most a few seconds, whatever the state of the cluster


@attrs.frozen
class Cluster:
    """The Ray to join or to start."""

    # address of the cluster to join, "auto" for this machine's; None to start a private Ray
    address: str | None = None
    cpus: float | None = None  # CPUs that a private Ray offers; None for this machine's
    # names of the GPUs that a private Ray offers, in the order of the ranks; None for detection by Ray, or for a
    # cluster to join
    gpus: tuple[str, ...] | None = None
    # the file with the token of the cluster to join; None for Ray's own environment
    token_file: str | None = None
    runtime_env: Mapping[str, Any] | None = None  # Ray's runtime environment of the actors

    @property
    def private(self) -> bool:
        """Whether the Ray is started for this driver alone."""
        return self.address is None


@attrs.frozen
class Slot:
    """A held slot, as found by the envoy."""

    index: int  # index of the bundle in the placement group; the slots themselves are sorted by node and device
    node: str  # name of the machine
    devices: tuple[int, ...]  # indices of the GPUs
    host: str  # address of the machine for other workers
    address: str  # address of the keeper


def tls_of_environment() -> Tls | None:
    """Return the certificates in `RAY_USE_TLS` and related variables; None if Ray doesn't encrypt.

    Raises:
        ConfigError: A file is missing. (The connection must not fall back to clear text.)
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("0", "false", ""):
        return None
    paths = {name: os.environ.get(name, "") for name in _FILES}
    missing = [f"{name}={path!r}" for name, path in paths.items() if not Path(path).is_file()]
    if missing:
        raise ConfigError(f"RAY_USE_TLS is set, but these name no file: {', '.join(missing)}")
    return Tls(*(Path(path).read_text() for path in paths.values()))

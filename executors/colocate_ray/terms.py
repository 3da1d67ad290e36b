"""What the driver, its envoy and its Ray actors have in common: plain data, and certificates. Imports no Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from colocate.errors import ConfigError
from colocate.wire import Tls

_FILES = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
HEAD = "check_head"  # of all requests the one that takes a few seconds at most, whatever the cluster is up to


@attrs.frozen
class Cluster:
    """Which Ray to be in."""

    # Of the cluster to join, "auto" for the one of this machine; None to start a private one
    address: str | None = None
    cpus: float | None = None  # CPUs that a private one offers; None for this machine's
    # GPUs that a private one offers, by name and in the order of the ranks; None when it is to look itself, or isn't
    # private
    gpus: tuple[str, ...] | None = None
    # The file with the token of the cluster to join; None for what Ray's environment says
    token_file: str | None = None
    runtime_env: Mapping[str, Any] | None = None  # ray's runtime environment of the actors

    @property
    def private(self) -> bool:
        """Whether it is started for this driver alone."""
        return self.address is None


@attrs.frozen
class Slot:
    """A slot that is held, as the envoy found it."""

    index: int  # which bundle of its placement group it is; the slots themselves are sorted by node and device
    node: str  # name of the machine
    devices: tuple[int, ...]  # indices of its GPUs
    host: str  # address under which other workers reach the machine
    address: str  # that of its keeper


def tls_of_environment() -> Tls | None:
    """Return what `RAY_USE_TLS` and the variables beside it say of this machine; None where Ray doesn't encrypt.

    Raises:
        ConfigError: Something is missing. (Nothing goes on in clear text then.)
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("0", "false", ""):
        return None
    paths = {name: os.environ.get(name, "") for name in _FILES}
    missing = [f"{name}={path!r}" for name, path in paths.items() if not Path(path).is_file()]
    if missing:
        raise ConfigError(f"RAY_USE_TLS is set, but these name no file: {', '.join(missing)}")
    return Tls(*(Path(path).read_text() for path in paths.values()))

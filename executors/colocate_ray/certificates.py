"""Certificates: where Ray encrypts its connections, keepers and workers encrypt theirs with the same."""

from __future__ import annotations

import os
from pathlib import Path

from colocate.errors import ConfigError
from colocate.wire import Tls

_FILES = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")


def tls_of_environment() -> Tls | None:
    """What `RAY_USE_TLS` and the variables beside it say of this machine; None where Ray doesn't encrypt.

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

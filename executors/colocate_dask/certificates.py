"""Certificates: what Dask encrypts with, keepers and their workers encrypt with too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed import Security

from colocate.errors import ConfigError
from colocate.wire import Tls


def security_of(value: Any) -> Security | None:
    """A `Security`, also from the options of one, as a config gives them.

    Raises:
        ConfigError: It is neither.
    """
    if value is None or isinstance(value, Security):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"connect('dask', security=...) takes a distributed.Security or its options, not {value!r}")
    try:
        return Security(**value)  # type: ignore[no-untyped-call]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"connect('dask', security=...): {error}") from error


def tls_of(security: Any, side: str) -> Tls:
    """What one side, "client" or "worker", proves itself with.

    Raises:
        ConfigError: It lacks something. (It must not go on in clear text.)
        OSError: A file can't be read.
    """
    names = ["tls_ca_file", f"tls_{side}_cert", f"tls_{side}_key"]
    parts = [getattr(security, name) for name in names]
    missing = [name for name, part in zip(names, parts, strict=True) if part is None]
    if missing:
        raise ConfigError(f"the Dask cluster uses tls://, but the {side}'s security lacks {', '.join(missing)}")
    return Tls(*map(_text, parts))


def _text(part: str) -> str:
    """PEM text, which Dask takes as it is or as the path of a file."""
    return part if "\n" in part else Path(part).read_text()

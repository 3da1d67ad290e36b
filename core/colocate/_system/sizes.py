"""Sizes as people write them."""

from __future__ import annotations

import re

from colocate._system.numbers import shown
from colocate.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_MOST = 1 << 60  # an exbibyte: more isn't in one machine
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: str | int, what: str) -> int:
    """A number of bytes from "20GiB", "512MB" or a number.

    Raises:
        ConfigError: It isn't a size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST:
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    size = -1.0 if found is None else float(found[1]) * _UNITS.get(found[2].upper(), -1)
    if not 0 <= size <= _MOST:
        raise ConfigError(f"{what}={shown(value)} is no size; write it like '20GiB', '512MB' or a number of bytes")
    return int(size)


def size_text(count: float) -> str:
    """A number of bytes as people read it."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(count) >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.1f}".removesuffix(".0") + f" {units[0]}"

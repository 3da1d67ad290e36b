"""Sizes as people write them."""

from __future__ import annotations

import re

from colocate.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: str | int, what: str) -> int:
    """A number of bytes from "20GiB", "512MB" or a number.

    Raises:
        ConfigError: It isn't a size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if found is None or found[2].upper() not in _UNITS:
        raise ConfigError(f"{what}={value!r} is no size; write it like '20GiB', '512MB' or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2].upper()])

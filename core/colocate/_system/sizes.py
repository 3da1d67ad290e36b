"""Sizes as people write them."""

from __future__ import annotations

import contextlib
import operator
import re
from typing import SupportsIndex

from colocate._system.numbers import shown
from colocate.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_MOST = 1 << 60  # an exbibyte: more isn't in one machine
_LEAST_WITHOUT_UNIT = 1024
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: str | SupportsIndex, what: str) -> int:
    """A number of bytes from "20GiB", "512MB" or a whole number, of NumPy's kinds, too.

    Raises:
        ConfigError: It isn't a size, or one so small that its unit was forgotten.
    """
    unit, size = "", -1.0
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if found is not None and found[2].upper() in _UNITS:
            unit = found[2]
            size = float(found[1]) * _UNITS[unit.upper()]
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # it is no whole number
            size = operator.index(value)
    if not 0 <= size <= _MOST:
        raise ConfigError(f"{what}={shown(value)} is no size; write it like '20GiB', '512MB' or a number of bytes")
    if not unit and 0 < size < _LEAST_WITHOUT_UNIT:
        raise ConfigError(
            f"{what}={shown(value)} has no unit, and would be bytes; write '{value}GiB', '{value}MB' or, if it is so "
            f"little, '{value}B'"
        )
    return int(size)


def size_text(count: float) -> str:
    """A number of bytes as people read it."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(count) >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.1f}".removesuffix(".0") + f" {units[0]}"

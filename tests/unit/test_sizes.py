"""Sizes as people read and write them."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from colocate._system.numbers import format_size, parse_bytes
from colocate.errors import ConfigError


def test_size_text() -> None:
    """A size is formatted in binary units, also a negative one."""
    for count, text in [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB"), (-5 << 30, "-5 GiB")]:
        assert format_size(count) == text


def test_a_size() -> None:
    """A size is parsed from an integer, or from a number with a unit."""
    sizes: list[tuple[str | int, int]] = [(0, 0), ("0", 0), (1024, 1024), ("4096", 4096), ("20B", 20), ("0.5KiB", 512)]
    for size, nbytes in sizes:
        assert parse_bytes(size, "device_memory") == nbytes
    assert parse_bytes(" 2 GB ", "device_memory") == 2 * 10**9
    found = parse_bytes(numpy.int64(2 << 30), "device_memory")
    assert (type(found), found) == (int, 2 << 30)


@pytest.mark.parametrize(
    "size", ["", "much", "-1GiB", "1e9", "20G", "0bananas", "\uff11GiB", -1, 4096.0, True, 1 << 61, "2000000TiB"]
)
def test_invalid_sizes_are_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"^device_memory=.* is no size; write it like '20GiB', '512MB' or a number"):
        parse_bytes(size, "device_memory")


@pytest.mark.parametrize("size", [20, "0.5", "1023.9"])
def test_a_unit_that_was_forgotten(size: str | int) -> None:
    told = f"^device_memory={size!r} has no unit, and would be bytes; write '{size}GiB'"
    with pytest.raises(ConfigError, match=told):
        parse_bytes(size, "device_memory")

"""Sizes as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from colocate._system.numbers import parse_bytes, size_text
from colocate.errors import ConfigError


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB"), (-5 << 30, "-5 GiB")]
)
def test_size_text(count: int, text: str) -> None:
    """A figure that is less than nothing, of memory that nobody owns, is one too."""
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [(0, 0), ("0", 0), (1024, 1024), ("4096", 4096), ("20B", 20), ("0.5KiB", 512), (" 2 GB ", 2 * 10**9)],
)
def test_a_size(size: str | int, nbytes: int) -> None:
    assert parse_bytes(size, "device_memory") == nbytes


def test_a_number_of_numpys() -> None:
    """As whoever has computed it has it."""
    numpy = pytest.importorskip("numpy")
    found = parse_bytes(numpy.int64(2 << 30), "device_memory")
    assert (type(found), found) == (int, 2 << 30)


@pytest.mark.parametrize(
    "size", ["", "much", "-1GiB", "1e9", "20G", "0bananas", "\uff11GiB", -1, 4096.0, True, 1 << 61, "2000000TiB"]
)
def test_what_is_no_size(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"^device_memory=.* is no size; write it like '20GiB', '512MB' or a number"):
        parse_bytes(size, "device_memory")


@pytest.mark.parametrize("size", [20, "20", "0.5", "1023.9"])
def test_a_unit_that_was_forgotten(size: str | int) -> None:
    told = f"^device_memory={size!r} has no unit, and would be bytes; write '{size}GiB'"
    with pytest.raises(ConfigError, match=told):
        parse_bytes(size, "device_memory")

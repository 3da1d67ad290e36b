"""Sizes as people read them."""

from __future__ import annotations

import pytest

from colocate._system.sizes import size_text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB"), (-5 << 30, "-5 GiB")]
)
def test_size_text(count: int, text: str) -> None:
    """A figure that is less than nothing, of memory that nobody owns, is one too."""
    assert size_text(count) == text

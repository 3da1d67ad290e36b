"""Every example of every page is run, and prints what the page shows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.docs.blocks import PAGES, blocks_of
from tests.docs.pages import untrue

NOT_RUN: dict[tuple[str, str], int] = {
    ("README.md", "trains for about a minute; the test test_the_two_commands checks both"): 2,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_true(page: Path, tmp_path: Path) -> None:
    """What a page says is done, and what it shows comes out."""
    wrong = list(untrue(page, tmp_path / "page"))
    assert not wrong, "\n\n".join(wrong)


def test_what_is_not_run_is_known() -> None:
    """A block that isn't run says why, and is on the list here."""
    found = Counter((page.name, block.not_run) for page in PAGES for block in blocks_of(page) if block.not_run)
    assert dict(found) == NOT_RUN
    assert all(block.not_run != "" for page in PAGES for block in blocks_of(page))

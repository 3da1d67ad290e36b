"""The suite on an executor from a separately installed distribution."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.distributions.install import HERE, Installed

from colocate.testing.executors import Executor


@pytest.fixture(scope="module", autouse=True)
def outpost(installed: Installed) -> Iterator[Path]:
    """Install the distribution on the path of this process and its children, as pip would."""
    folder = installed("outpost")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield folder


class TestOutpost(Executor):
    """Slots are kept by processes that a third-party executor has started."""

    executor = "outpost"
    last_words = "its post ended with exit code -9"


def test_outpost_source_is_short() -> None:
    lines = [line for file in (HERE / "outpost" / "outpost").glob("*.py") for line in file.read_text().splitlines()]
    assert len(lines) <= 240

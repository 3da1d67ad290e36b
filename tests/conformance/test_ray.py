from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.conformance.shared import cluster
from tests.suite.whole import Executor

pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def shared() -> Iterator[None]:
    """Start the cluster that the suite joins, except in tests with an engine of their own."""
    with cluster("ray") as options:
        TestRay.options = options
        yield


class TestRay(Executor):
    """Slots on a Ray cluster."""

    executor = "ray"
    private = {}
    last_words = "actor"

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.conformance.shared import cluster

from colocate.testing.executors import ExecutorSuite

pytest.importorskip("distributed")


@pytest.fixture(scope="module", autouse=True)
def shared() -> Iterator[None]:
    """The cluster that the suite joins, but where it asks for an engine of its own."""
    with cluster("dask") as options:
        TestDask.options = options
        yield


class TestDask(ExecutorSuite):
    """Slots on a Dask cluster."""

    executor = "dask"
    private = {}

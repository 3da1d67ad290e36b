from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.conformance.shared import cluster
from tests.suite.whole import Executor

from colocate.executor import Place

pytest.importorskip("distributed")


@pytest.fixture(scope="module", autouse=True)
def shared() -> Iterator[None]:
    """Start the cluster that the suite joins, except in tests with an engine of their own."""
    with cluster("dask") as options:
        TestDask.options = options
        yield


class TestDask(Executor):
    """Slots on a Dask cluster."""

    executor = "dask"
    private = {}
    last_words = "left the cluster"

    def vanish(self, place: Place) -> None:
        """Close the Dask worker: all Dask workers of the cluster share one process."""
        from distributed import Client

        async def close(keeper: str, dask_worker: Any) -> None:
            from colocate_dask.far import _on_workers

            here = _on_workers.get(dask_worker)
            if here is not None and any(each.address == keeper for each in here.keepers.values()):
                dask_worker.loop.add_callback(dask_worker.close, nanny=False)

        with Client(self.options["address"], set_as_default=False) as client:
            client.run(close, place.handle.address)

    def freeze(self, place: Place) -> None:
        """Skip: the Dask workers share the scheduler's process, which must not be stopped."""
        pytest.skip("the Dask workers of this cluster are in the scheduler's process; tests/dask stops one")

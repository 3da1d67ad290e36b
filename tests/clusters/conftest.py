"""Fixtures for machines, and for engines on these machines.

`make clusters` runs all tests of this folder, `make test` one of these. Without root all are skipped with that reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.clusters.engines import OnMachines, dask_on, ray_on
from tests.clusters.machines import Machines, lacks

HERE = Path(__file__).parent
IN_MAKE_TEST = "test_slurm.py::test_stopped_job_saves_and_resumes[one node-preempted-0]"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and not item.nodeid.endswith(IN_MAKE_TEST):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip the test if this machine can't make machines out of namespaces."""
    missing = lacks()
    if missing is not None:
        pytest.skip(missing)


@pytest.fixture
def machines(namespaces: None) -> Iterator[Callable[[int], Machines]]:
    """Yield a function that starts machines n0, n1 ..., which end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(Machines(count))


@pytest.fixture(params=["ray", "dask"])
def cluster(machines: Callable[[int], Machines], request: pytest.FixtureRequest) -> Callable[..., OnMachines]:
    """Return a function that starts the engine on machines of its own: `cluster(nodes, **options)`."""
    pytest.importorskip({"ray": "ray", "dask": "distributed"}[request.param])
    starts: dict[str, Callable[..., OnMachines]] = {"ray": ray_on, "dask": dask_on}
    return lambda nodes, **options: starts[request.param](machines(nodes + 1), **options)

"""Machines for tests, and engines on them.

`make clusters` runs what is here, `make test` one of them. Without root all is skipped, and that is said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.clusters.engines import OnMachines, dask_on, ray_on
from tests.clusters.machines import Machines, lacks

HERE = Path(__file__).parent
IN_MAKE_TEST = "test_slurm.py::test_it_saves_and_goes_on[one node-preempted-0]"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and not item.nodeid.endswith(IN_MAKE_TEST):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def namespaces() -> None:
    """This machine lets us make others."""
    missing = lacks()
    if missing is not None:
        pytest.skip(missing)


@pytest.fixture
def machines(namespaces: None) -> Iterator[Callable[[int], Machines]]:
    """How a test gets machines: n0, n1 ... that are gone after it."""
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(Machines(count))


@pytest.fixture(params=["ray", "dask"])
def cluster(machines: Callable[[int], Machines], request: pytest.FixtureRequest) -> Callable[..., OnMachines]:
    """How a test gets an engine on machines of its own, each engine in turn: `cluster(nodes, **options)`."""
    pytest.importorskip({"ray": "ray", "dask": "distributed"}[request.param])
    starts: dict[str, Callable[..., OnMachines]] = {"ray": ray_on, "dask": dask_on}
    return lambda nodes, **options: starts[request.param](machines(nodes + 1), **options)

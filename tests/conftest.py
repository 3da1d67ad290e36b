import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.distributions.install import Installed
from tests.forked import Forks

from colocate.keeper import forks as templates
from colocate.testing import leaks

pytest.register_assert_rewrite("colocate_rollout.testing", "tests.suite")  # before the first import of these
# A shell's background jobs and their children ignore SIGINT: the tests of Ctrl-C wouldn't work there.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Torch looks up the name of each address that a store's client connects to. A lost answer would delay a test by 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# Tests compute little: threads beyond the number of processors only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A template outlives test files that start no worker: the next template would import torch again.
templates.TEMPLATE_IDLE_S = 3600.0

# The longest files run first, so that no process has to run one of these alone at the end.
LONGEST = (
    "conformance/test_processes.py",
    "docs/test_pages.py",
    "conformance/test_dask.py",
    "conformance/test_ray.py",
    "ppo/",
    "clusters/",
    "ray/",
    "laws/",
    "conformance/",
    "dask/",
    "cli/",
    "signals/",
    "engines/",
    "chaos/",
)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("in_make_test"):
            if item.callspec.id not in marker.args:  # type: ignore[attr-defined]
                item.add_marker("long")

    def turn(item: pytest.Item) -> int:
        path = item.path.relative_to(HERE).as_posix()
        return next((i for i, start in enumerate(LONGEST) if path.startswith(start)), len(LONGEST))

    items.sort(key=turn)
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        # One process runs all tests of a file, which share fixtures. The environments beside `.venv` have no xdist.
        item.add_marker(pytest.mark.xdist_group(item.path.relative_to(HERE).as_posix()))


def pytest_collection() -> None:
    """Disable garbage collection: scanning imports and collected tests, which stay, takes a fifth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Freeze all objects of the collection: the tests collect garbage often, and needn't scan the imports each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return the distributions under tests/distributions, installed by pip into throwaway folders."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "installed"  # once for all processes
    folder.mkdir(exist_ok=True)
    return Installed(folder)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Yield the process from which tests fork commands."""
    with leaks.share_between_tests():
        forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(autouse=True)
def leave_nothing(no_leaks: None) -> None:
    """Apply the check `no_leaks` to every test."""

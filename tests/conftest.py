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

pytest.register_assert_rewrite("colocate_rollout.testing", "tests.suite")  # before anything imports that
# A shell has its background jobs ignore SIGINT, and whatever they start: the tests of Ctrl-C wouldn't work there.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Torch asks for the name of each address that a store's client connects to. Where such an answer is lost, a test had
# stood still for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# What tests compute is small: more threads than processors wait for each other, and compute nothing meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A template stays while files are run whose tests start no worker: the next one would import torch anew.
templates.TEMPLATE_IDLE_S = 3600.0

# The longest files go first, so that no process has one for itself in the end.
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("in_make_test"):
            if item.callspec.id not in marker.args:  # type: ignore[attr-defined]
                item.add_marker("long")

    def turn(item: pytest.Item) -> int:
        path = item.path.relative_to(HERE).as_posix()
        return next((i for i, start in enumerate(LONGEST) if path.startswith(start)), len(LONGEST))

    items.sort(key=turn)
    for item in items:  # who runs a test of a file runs all of them, as they share its fixtures
        item.add_marker(pytest.mark.xdist_group(item.path.relative_to(HERE).as_posix()))


def pytest_collection() -> None:
    """What is imported and collected stays: looking for garbage among it takes a fifth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Garbage is collected often in these tests; what was imported for them needs no looking at each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The distributions under tests/distributions, installed by pip into throwaway folders."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "installed"  # once for all processes
    folder.mkdir(exist_ok=True)
    return Installed(folder)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """What commands are forked from."""
    with leaks.share_between_tests():
        forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(autouse=True)
def leave_nothing(no_leaks: None) -> None:
    """No test may leave anything behind."""

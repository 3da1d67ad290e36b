"""`make verl-tests` runs these tests, on COLOCATE_VERL or else local: `make test` has no verl."""

import importlib.util
import os
import tempfile
from collections.abc import Iterator

import pytest

collect_ignore_glob = ["*"] if importlib.util.find_spec("verl") is None else []
if not collect_ignore_glob:
    os.environ.setdefault("COLOCATE_VERL", "local")
    os.environ.setdefault("VERL_USE_EXTERNAL_PLUGINS", "colocate")


@pytest.fixture(autouse=True, scope="session")
def cluster() -> Iterator[None]:
    """Start a cluster with room for all worker groups of these tests, on executors that count CPUs."""
    if collect_ignore_glob:
        yield
        return
    import colocate_verl
    from colocate_verl.driver import ENGINE

    executor = os.environ["COLOCATE_VERL"]
    colocate_verl.install(executor, **({"cpus": 64} if executor == "dask" else {}))
    if executor != "ray":
        ENGINE.connect_runtime()
        yield
        return
    import ray

    with tempfile.TemporaryDirectory(prefix="verl", dir="/tmp") as folder:  # Ray's socket paths must be short.
        ray.init(num_cpus=64, num_gpus=0, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        ENGINE.connect_runtime()
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """Wait for a test's worker groups, which end when they are collected."""
    yield
    from colocate_verl.driver import ENGINE

    ENGINE.wait_closed()

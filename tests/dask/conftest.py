from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.clusters import started

import colocate
from colocate import Runtime
from colocate.testing.probes.plain import Echo

pytest.importorskip("distributed", reason="Dask is not installed")

# Imitates dask-cuda's workers: one per GPU, all GPUs visible, the worker's own first.
DASK_CUDA = "import sys, types; sys.modules['dask_cuda'] = types.ModuleType('dask_cuda')\n"


@contextmanager
def running(
    workers: Sequence[dict[str, Any]], *more: str, port: int = 0, stderr: int = subprocess.DEVNULL
) -> Iterator[str]:
    """Start a cluster, on the given port if it isn't 0; yield its address."""
    script = Path(__file__).with_name("clusters.py")
    command = [sys.executable, str(script), json.dumps(workers), str(port), *more]
    with started("dask", command, stderr=stderr, own_temporary=True) as (_, options):
        yield options["address"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start five workers: two alike, and on another address one that declares 2 GPUs and two like dask-cuda's."""
    fake = tmp_path_factory.mktemp("preload") / "pretend_dask_cuda.py"
    fake.write_text(DASK_CUDA)
    cuda = {"host": "127.0.0.2", "nthreads": 1, "preload": [str(fake)]}
    workers: list[dict[str, Any]] = [
        {"host": "127.0.0.1", "nthreads": 2},
        {"host": "127.0.0.1", "nthreads": 2},
        {"host": "127.0.0.2", "nthreads": 4, "resources": {"GPU": 2, "disk": 1}, "memory_limit": 2**30, "name": "big"},
        {**cuda, "env": {"CUDA_VISIBLE_DEVICES": "7,6"}},
        {**cuda, "env": {"CUDA_VISIBLE_DEVICES": "6,7"}},
    ]
    with running(workers) as address:
        yield address


@pytest.fixture(scope="module")
def runtime(cluster: str) -> Iterator[Runtime]:
    with colocate.connect("dask", address=cluster) as runtime:
        with runtime.reserve(5, cpus=0) as pool:  # the first worker makes objects that last
            pool.spawn({"echo": colocate.role(Echo)})
        at_the_same_time(runtime._node.services.executor.nodes)
        yield runtime


def at_the_same_time(ask: Callable[[], Any]) -> None:
    """Make Dask open as many connections to the scheduler as any test needs; Dask keeps them."""
    with ThreadPoolExecutor(3) as threads:
        for asked in [threads.submit(ask) for _ in range(3)]:
            asked.result()


@pytest.fixture(scope="module")
def other(cluster: str) -> Iterator[Any]:
    """Connect a plain Dask client, as another user of the cluster."""
    from distributed import Client

    from colocate_dask import undocumented

    made: Any = Client
    with made(cluster, set_as_default=False) as client:
        undocumented.stop_polling(client)
        at_the_same_time(lambda: client.run(os.getpid))
        yield client


def script(text: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a driver in its own process."""
    preamble = "import json, os, sys, threading\nimport colocate\nfrom colocate.testing.probes.plain import Echo\n"
    return subprocess.Popen(
        [sys.executable, "-c", preamble + textwrap.dedent(text), *arguments],
        env={**os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def planted(client: Any, label: str) -> Iterator[str]:
    """Hold a Dask worker for a client that doesn't exist; yield the worker's address."""

    from colocate_dask import reservations, undocumented
    from colocate_dask.offers import SlotRequest

    async def plant(label: str, dask_scheduler: Any) -> str:  # nested, so that it is sent by value
        table = undocumented.find_plugin(dask_scheduler, reservations.NAME)
        wanted = SlotRequest("planted", "Client-that-is-gone", "lost", 1, label=label)
        free = next(offer for offer in await table.offers() if not offer.taken)
        return str(table._hold(wanted, free).worker)

    async def pull_out(dask_scheduler: Any) -> None:
        await undocumented.find_plugin(dask_scheduler, reservations.NAME).release("planted")

    worker: str = client.run_on_scheduler(plant, label)
    try:
        yield worker
    finally:
        client.run_on_scheduler(pull_out)

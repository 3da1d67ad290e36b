from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from tests.dask.conftest import running

import colocate
from colocate import Runtime


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Three workers alike."""
    with running([{"host": "127.0.0.1", "nthreads": 1}] * 3) as address:
        yield address


@pytest.fixture
def runtime(cluster: str) -> Iterator[Runtime]:
    with colocate.connect("dask", address=cluster) as runtime:
        yield runtime


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"

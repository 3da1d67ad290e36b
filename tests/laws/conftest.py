"""Settings of the law tests: a bounded, repeatable search, on one thread of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# COLOCATE_LAWS=10 searches longer: ten times as many examples, new ones each time; `make suites` takes 3.
TIMES = int(os.environ.get("COLOCATE_LAWS", "1"))
settings.register_profile(
    "laws",
    derandomize=TIMES == 1,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("laws")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: small tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def examples() -> dict[str, int]:
    """Return the number of examples for each executor."""
    return {"threads": 20 * TIMES, "strict": 10 * TIMES, "processes": 4 * TIMES}

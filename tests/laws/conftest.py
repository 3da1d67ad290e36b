"""What the tests of the laws share: a bounded, repeatable search, on one thread of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# For a longer search: COLOCATE_LAWS=10 tries ten times as many examples, other ones each time; `make suites` takes 3.
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
    """Small tensors gain nothing from more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def examples() -> dict[str, int]:
    """How many examples are tried on which executor."""
    return {"threads": 20 * TIMES, "strict": 10 * TIMES, "processes": 4 * TIMES}

"""What is left of colocate works without a feature: two of the table, drawn by the commit (`make without` has all)."""

from __future__ import annotations

import random
import subprocess

import pytest
from tests import without

from colocate.features import FEATURES

COMMIT = subprocess.run(["git", "rev-parse", "HEAD"], cwd=without.ROOT, capture_output=True, text=True, check=False)
DRAWN = random.Random(COMMIT.stdout).sample(sorted(FEATURES), 2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("feature", DRAWN)
def test_the_rest_runs(feature: str) -> None:
    code, printed = without.run(feature, "-x")
    assert code == 0, printed

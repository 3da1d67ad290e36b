"""Test suites for executors and for role classes, and a pytest fixture that finds leaked resources.

- `colocate.testing.executors.Executor`: subclass it in a test file to test an executor.
- `colocate.testing.roles.RoleSuite`: subclass it to test a role class.
- `no_leaks`: a pytest fixture, available once colocate is installed, that fails a test which leaves resources behind.

All of this needs pytest, which colocate itself doesn't need. This function works without pytest:

- `assert_same_weights(a, b)`: an assertion that two roles have the same weights, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import colocate


def assert_same_weights(a: Any, b: Any, *, names: Mapping[str, str | None] | None = None) -> None:
    """Assert that two roles have the same weights on all ranks. Arguments and errors are as in `compare_weights`.

    Raises:
        AssertionError: The weights differ; the error text has a table of the differences.
    """
    comparison = colocate.compare_weights(a, b, names=names)
    if not comparison.same:
        raise AssertionError(str(comparison))

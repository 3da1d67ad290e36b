"""Suites that an executor or a role plugin runs on itself, and a fixture that finds leaks.

- `colocate.testing.executors.Executor`: subclass it in a test file to try an executor.
- `colocate.testing.roles.RoleSuite`: subclass it to try a role class.
- `no_leaks`: a pytest fixture (there as soon as colocate is installed) that fails a test which leaves something behind.

All of it needs pytest, which colocate itself doesn't; but for:

- `assert_same_weights(a, b)`: an assertion that two roles have the same weights, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import colocate


def assert_same_weights(a: Any, b: Any, *, names: Mapping[str, str | None] | None = None) -> None:
    """Assert that two roles have the same weights on all of their ranks. Args, errors: as of `compare_weights`.

    Raises:
        AssertionError: They haven't; its text has the table of what differs.
    """
    comparison = colocate.compare_weights(a, b, names=names)
    if not comparison.same:
        raise AssertionError(str(comparison))

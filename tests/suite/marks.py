"""A mark for feature tests that run on each executor, because the executor does part of the work."""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def mark_executor_part(test: F) -> F:
    """Mark a feature's test that depends on the executor's values, messages or worker exits."""
    test.__dict__["level"] = "executor"
    return test

"""Mark the laws of features that each executor is tried on: they stand on what it does itself."""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def mark_executor_part(test: F) -> F:
    """Mark a test of what an executor carries for a feature: values, messages, a death."""
    test.__dict__["level"] = "executor"
    return test

"""The driver's terminal, where something else is about to use it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

drawing: list[Callable[[], AbstractContextManager[object]]] = []
"""What draws on the terminal now and then: in a block of each of these it doesn't."""

"""Coordinate the use of the driver's terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

drawing: list[Callable[[], AbstractContextManager[object]]] = []
"""Context managers of displays that draw on the terminal: inside each block the display is paused."""

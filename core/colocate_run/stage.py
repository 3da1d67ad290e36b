"""`Stage`: who is told what a start is doing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

Stage: TypeAlias = Callable[[str, str], AbstractContextManager[object]]
"""Entered for each step of a start, with its name and in words what is done."""

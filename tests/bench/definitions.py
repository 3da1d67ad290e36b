"""What it costs to name a class of the script, which the workers know already, beside one of an installed module."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from tests.bench.measure import side_by_side
from tests.bench.rows import Row

import colocate
from colocate import Role, method, wire

_PART = "a second value of a script's class"
_SCRIPT = """
class Item:
    def __init__(self, x):
        self.x = x

    def over(self):
        return self.x > LIMIT

LIMIT = bytes(100_000)
"""


class Taker(Role):
    @method
    def take(self, value: object) -> None:
        """Do nothing with it."""


def rows() -> Iterator[Row]:
    """Its bytes, and how much longer a call takes that has it as its argument."""
    names: dict[str, Any] = sys.modules["__main__"].__dict__
    exec(_SCRIPT, names)
    own, installed = names["Item"](1), argparse.Namespace(x=1)
    yield Row(_PART, "bytes", len(wire.pack(own).data), "B", 1000)
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(slots=1) as pool:
        take = pool.spawn({"taker": colocate.role(Taker)}).role("taker", Taker).take
        timed = side_by_side({"own": lambda: take(own), "installed": lambda: take(installed)}, rounds=60, calls=50)
    above = [(mine - its) * 1e6 for mine, its in zip(timed["own"].medians, timed["installed"].medians, strict=True)]
    yield Row(_PART, "above one of an installed class", statistics.median(above), "µs", 100)

"""Tracebacks of errors that are raised again don't grow, and closed groups keep no roles."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import traceback
import weakref
from pathlib import Path
from typing import ClassVar

import pytest

import colocate
from colocate import PlacementError, Role, RoleError, RoleStartError, method
from colocate.executor import Node, Request
from colocate.placement import Ledger
from colocate.testing.waiting import wait_until


class Heavy(Role):
    """A role that records its instances, which know each other by their contexts."""

    made: ClassVar[list[weakref.ref[Heavy]]] = []

    def __init__(self, breaks: bool = False) -> None:
        self.made.append(weakref.ref(self))
        if breaks:
            raise ValueError("on purpose")

    @method
    def fail(self) -> None:
        raise ValueError("on purpose")

    @method
    def give(self) -> list[int]:
        return [len(self.made)]

    @method
    async def later(self) -> int:
        await asyncio.sleep(0)
        return 1

    def save(self, directory: str) -> None:
        """Save nothing."""

    def restore(self, directory: str) -> None:
        """Restore nothing."""


def test_reraised_error_traceback_does_not_grow() -> None:
    """An error that is raised again has a traceback of the same length: it keeps no earlier frames."""
    with colocate.connect("local") as runtime:
        heavy = runtime.reserve(1).spawn({"heavy": colocate.role(Heavy)}).role("heavy", Heavy)
        call, kept = heavy.fail.submit(), heavy.fail.keep()
        for again in (call.result, kept.fetch):
            lengths = set()
            for _ in range(5):
                with pytest.raises(RoleError) as caught:
                    again()
                lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
            # The first wait for a kept call is on another line; otherwise all lengths are equal.
            assert len(lengths) <= 2


@pytest.mark.parametrize("strict", [False, True])
def test_a_closed_group_holds_no_role(strict: bool, tmp_path: Path) -> None:
    """A closed group on threads keeps none of its roles alive, even while its object lives and the collector is off."""
    Heavy.made.clear()
    gc.disable()
    try:
        with colocate.connect("local", strict=strict) as runtime, runtime.reserve(2) as pool:
            group = pool.spawn({"first": colocate.role(Heavy), "second": colocate.role(Heavy)})
            view = group.role("first", Heavy)
            kept = view.give.keep()
            assert kept.fetch() == [[4], [4]]
            assert view.later() == [1, 1]
            call = view.fail.submit()
            assert isinstance(call.exception(), RoleError)
            assert group.run(lambda ctx: type(ctx.sibling("first")).__name__) == ["Heavy", "Heavy"]
            group.checkpoint(tmp_path / "one")
            assert [made() is not None for made in Heavy.made] == [True] * 4
            group.close()
            assert [made() for made in Heavy.made] == [None] * 4
            with pytest.raises(RoleStartError):
                pool.spawn({"first": colocate.role(Heavy), "second": colocate.role(Heavy, breaks=True)})
            assert len(Heavy.made) > 4
            wait_until(lambda: not any(made() for made in Heavy.made), "lanes that had no time to end have ended")
    finally:
        gc.enable()


def test_left_open_with_errors() -> None:
    """Runtimes that nobody has closed are closed at exit, even where warnings are errors."""
    script = """
import atexit, colocate
runtimes = [colocate.connect("local") for _ in range(2)]
import colocate._api.connection as module
atexit.unregister(module._close_leftovers)
module._close_leftovers()
print([runtime.state for runtime in runtimes])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == "['closed', 'closed']\n"
    assert done.stderr.count("was never closed") >= 2


def test_parts_of_cpus() -> None:
    """Parts of a CPU add up, although their floating-point sums don't quite."""
    ledger = Ledger([Node("here", cpus=0.3)], lambda devices: "cpu")
    for _ in range(20):
        pool = ledger.reserve(Request(3, cpus=0.1, timeout=0))
        ledger.release(pool)
    with pytest.raises(PlacementError):
        ledger.reserve(Request(4, cpus=0.1, timeout=0))

"""What role code prints and logs: shown on the driver while the role runs, with its name."""

from __future__ import annotations

import io
import logging
import sys

import pytest

import colocate
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.gate import Gate
from colocate.testing.probes.plain import Talker
from colocate.testing.waiting import wait_until


class Printing(ExecutorCase):
    """Nobody waits for the end of a method to read what it says."""

    @needs(OwnProcess)
    def test_a_progress_bar(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
        """It is shown while it goes on; its end is shown once, as its last state."""
        monkeypatch.setattr(sys, "stderr", read := io.StringIO())
        talker = spawn({"talker": colocate.role(Talker).on(slots=[0])}, name="bars").role("talker", Talker)
        call = talker.count_to_two.submit(gate.address)
        gate.wait_for()
        wait_until(lambda: "[bars/talker 0] 1 of 2\n" in read.getvalue(), "the bar is shown")
        gate.open()
        call.result()
        wait_until(lambda: "after it" in read.getvalue(), "all is shown")
        assert read.getvalue().endswith("[bars/talker 0] 2 of 2\n[bars/talker 0] after it\n")

    @needs(OwnProcess)
    def test_logs(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the driver shows logs, workers log what its levels let through."""
        monkeypatch.setattr(sys, "stderr", read := io.StringIO())
        root, mine = logging.getLogger(), logging.getLogger("colocate_mine")
        monkeypatch.setattr(root, "handlers", [logging.NullHandler()])
        monkeypatch.setattr(root, "level", logging.INFO)
        monkeypatch.setattr(mine, "level", logging.DEBUG)
        talker = spawn({"talker": colocate.role(Talker).on(slots=[0])}, name="logs").role("talker", Talker)
        talker.log(["colocate_mine", "colocate_other"])
        wait_until(lambda: "INFO:colocate_other" in read.getvalue(), "the last line is shown")
        lines = [line for line in read.getvalue().splitlines() if "colocate_" in line]
        shown = ["DEBUG:colocate_mine:said", "INFO:colocate_mine:said", "INFO:colocate_other:said"]
        assert lines == [f"[logs/talker 0] {each}" for each in shown]

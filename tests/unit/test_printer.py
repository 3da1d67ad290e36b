"""The printer: a late reader, a missing reader, and streams that the user has replaced."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from colocate._system.printer import Printer, report_when_slow
from colocate.testing.waiting import PATIENCE_S, wait_until


def test_a_reader_that_is_late() -> None:
    """A late reader delays no writer, and gets the first lines and the number of dropped ones."""
    reader, writer = os.pipe()
    with open(reader, encoding="ascii") as read, ThreadPoolExecutor(1) as late:
        with open(writer, "w", encoding="ascii") as stream, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", stream)  # Not in a fixture: pytest replaces sys.stderr after those.
            patch.setattr(sys, "__stderr__", stream)
            printer = Printer("test-output")
            for number in range(3000):  # Three times the buffer: a printer that waits for its reader would never end.
                printer.print_line(f"{number} {'x' * 1000}")
            lines = late.submit(read.readlines)
            printer.close()
        *shown, last = lines.result(PATIENCE_S)
    assert [line.split()[0] for line in shown] == [str(number) for number in range(len(shown))]
    assert 1000 < len(shown) < 1200
    count = 3000 - len(shown)
    assert last == f"[colocate] {count} lines of workers' output were dropped here: they weren't read fast enough\n"


def test_streams_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose write raises loses its lines, and gets their number once it works again."""

    class Odd(io.StringIO):
        error: BaseException | None = SystemExit("no more")

        def write(self, text: str) -> int:
            if self.error is not None:
                raise self.error
            return super().write(text)

    odd = Odd()
    monkeypatch.setattr(sys, "stderr", odd)
    printer = Printer("test-output")
    for number in range(3):
        printer.print_line(f"lost {number}")
        wait_until(lambda: not printer._lines, "it is taken")
    printer._jobs.run(lambda: None)
    odd.error = None
    printer.print_line("shown")
    printer.close()
    assert odd.getvalue().splitlines() == [
        "[colocate] 3 lines of workers' output were dropped here: sys.stderr raised SystemExit: no more",
        "shown",
    ]


DRIVER = """
import sys
import colocate
from tests.suite.probes.plain import Talker

with colocate.connect("local", processes=True) as runtime:
    group = runtime.reserve(2).spawn({"talker": colocate.role(Talker)})
    talker = group.role("talker", Talker)
    talker.talk(2000, 1000)
    assert talker.talk(1, 1) == [1, 1]
    group.close(grace=1)
    print("closed", flush=True)
"""


def test_unread_output_blocks_nothing() -> None:
    """Four megabytes of output to an unread stderr pipe block no call, no close and no exit."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    with driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "closed\n"
            assert driver.wait(PATIENCE_S) == 0
        finally:
            driver.kill()


def test_slow_start_is_reported_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocate._system.printer.CONNECTING_S", 0.01)
    monkeypatch.setattr(sys, "stderr", read := io.StringIO())
    with report_when_slow("reserve(name='main')"):
        wait_until(lambda: read.getvalue().count("[colocate] reserve(name='main'): 0 s\n") > 1, "it is told twice")
    assert not [thread for thread in threading.enumerate() if thread.name == "colocate-start"]

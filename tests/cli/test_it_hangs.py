"""The page "Look inside a run": its commands, each in its own terminal, print the page's output."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from tests.cli.conftest import CommandLine
from tests.cli.test_debug import Screen
from tests.docs.blocks import ROOT, blocks_of
from tests.docs.outputs import matches
from tests.docs.pages import _commands

PAGE = ROOT / "docs" / "look-inside.md"


@pytest.mark.long
def test_the_commands_of_the_page(colocate: CommandLine) -> None:
    """Each command of the page prints the output that the page shows."""
    blocks = blocks_of(PAGE)
    for block in blocks:
        if block.file is not None:
            colocate.write(block.file, block.text)
    typed = [block for block in blocks if block.not_run and "tests/cli/test_it_hangs.py" in block.not_run]
    commands = [each for block in typed for each in _commands(block)]
    assert [each.text.split()[1] for each in commands] == ["run", "top", "stacks", "logs"]
    with_color, environment = colocate.command(*commands[0].text.split()[1:])
    environment |= {"TERM": "xterm", "NO_COLOR": "1"}
    run = Screen(with_color, colocate.folder, environment)
    try:
        run.until(" 0 rows")
        for each in commands[1:]:
            command, _ = colocate.command(*each.text.split()[1:])
            shown = Screen(command, colocate.folder, environment)
            try:
                found = _read(shown, colocate.folder)
            finally:
                shown.close()
            assert each.shown is not None
            assert matches(_ages(each.shown), _ages(found)), f"{each.text} shows\n{found}"
        run.process.send_signal(signal.SIGINT)
        run.until("stopping after a checkpoint")
        run.process.send_signal(signal.SIGINT)
        run.until("everything is closed")
    finally:
        run.close()


def _read(screen: Screen, folder: Path) -> str:
    """Return a command's output until its end."""
    with_end: list[str] = []
    try:
        while True:
            with_end.append(screen.until("\n"))
    except AssertionError:
        assert screen.process.wait(timeout=60) == 0, with_end  # the program has closed its terminal
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join([*with_end, screen.shown]))
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return text.replace(f"{folder}/", "").replace("\n\n\n", "\n\n")


def _ages(text: str) -> str:
    """Return the text without process ids, times and percentages."""
    text = re.sub(r"\bprocess \d+", "process N", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+", "TIME", text)
    return re.sub(r"\b\d+%", "N%", text)

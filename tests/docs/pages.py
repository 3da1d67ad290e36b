"""Run a page's blocks in a folder of their own, and report where the page is wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from tests.docs.blocks import ROOT, Block, blocks_of
from tests.docs.outputs import matches
from tests.forked import Forks


@attrs.frozen
class Step:
    """A step of trying a page, with the lines of the page that show its output.

    Attributes:
        do: python, write, config or command.
        line: The line of the page.
        text: The text to run or to write.
        file: The file to write.
        wrong: Whether the text must be refused.
        shown: The output in the page; None if the page shows none.
        at: The range of the output's lines, counted from 0, without its end.
    """

    do: str
    line: int
    text: str
    file: str | None = None
    wrong: bool = False
    shown: str | None = None
    at: tuple[int, int] = (0, 0)


def steps_of(page: Path) -> list[Step]:
    """Return the steps of trying a page."""
    blocks = blocks_of(page)
    outputs = {block.output_of: block for block in blocks if block.output_of is not None}
    steps: list[Step] = []
    for index, block in enumerate(blocks):
        if block.not_run is None and block.output_of is None:
            steps += _steps(block, outputs.get(index))
    return steps


def run(page: Path, folder: Path, forks: Forks) -> list[tuple[Step, str]]:
    """Run the steps of a page; return each with its output.

    Raises:
        AssertionError: A step failed, or standard error has a warning.
    """
    steps = steps_of(page)
    (folder / "docs").mkdir(parents=True)
    for name in (".site", ".tmp"):
        (folder / name).mkdir()
    (folder / "docs" / "examples").symlink_to(ROOT / "docs" / "examples")
    plan, results = folder / ".steps.json", folder / ".results.json"
    plan.write_text(json.dumps([attrs.asdict(step) for step in steps]))
    session = Path(__file__).with_name("session.py")
    done = forks.run([str(plan), str(results)], folder, _environment(folder), session)
    assert results.exists(), f"{page.name}: the session ended early\n{done.stderr}"
    found: list[dict[str, Any]] = json.loads(results.read_text())
    for step, result in zip(steps, found, strict=False):
        assert result["error"] is None, f"{page.name}, line {step.line}:\n{result['error']}"
    assert done.returncode == 0, f"{page.name}: exit status {done.returncode}\n{done.stderr}"
    assert "Warning" not in done.stderr, f"{page.name}:\n{done.stderr}"
    return [(step, result["output"].replace(f"{folder}/", "")) for step, result in zip(steps, found, strict=True)]


def untrue(page: Path, folder: Path, forks: Forks) -> Iterator[str]:
    """Yield an error text for each place where a page shows another output than the real one."""
    for step, output in run(page, folder, forks):
        if not matches(step.shown or "", output):
            yield f"{page.name}, line {step.line} shows\n{step.shown}\nbut this comes out:\n{output}"


def _steps(block: Block, output: Block | None) -> list[Step]:
    if block.language == "console":
        return list(_commands(block))
    if block.file and block.file.startswith("docs/examples/"):
        assert block.text == (ROOT / block.file).read_text(), f"line {block.line} is not what {block.file} has"
        return []  # The folder has these files already.
    do = {"yaml": "config", "toml": "write"}.get(block.language)
    if block.language == "python":
        do = "write" if block.file else "python"
    assert do is not None, f"line {block.line}: nobody knows how to try a block of {block.language or 'no language'}"
    shown = None if output is None else output.text
    at = (0, 0) if output is None else (output.line - 1, output.line - 1 + output.text.count("\n"))
    return [Step(do, block.line, block.text, block.file, block.wrong, shown, at)]


def _commands(block: Block) -> Iterator[Step]:
    """Yield a step for each line that begins with `$ `; the lines after it show its output."""
    lines = block.text.splitlines()
    assert lines[0].startswith("$ "), f"line {block.line}: a console block begins with a command"
    starts = [index for index, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        typed = start + 1
        while lines[typed - 1].endswith("\\"):
            typed += 1
        command = "\n".join(lines[start:typed]).removeprefix("$ ")
        shown = "\n".join(lines[typed:end])
        at = (block.line - 1 + typed, block.line - 1 + end)
        yield Step("command", block.line + start, command, shown=shown, at=at)


def _environment(folder: Path) -> dict[str, str]:
    """Return a reader's environment after the installation; `pip install` installs into the page's folder."""
    site = folder / ".site"
    path = os.pathsep.join([str(site / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    pip = {"TARGET": str(site), "NO_DEPS": "1", "NO_BUILD_ISOLATION": "0", "NO_INDEX": "1", "QUIET": "1"}
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(site),
        "TMPDIR": str(folder / ".tmp"),
        "OMP_NUM_THREADS": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **{f"PIP_{name}": value for name, value in pip.items()},
    }

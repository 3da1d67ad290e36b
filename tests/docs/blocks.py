"""The code blocks of a Markdown page, and the page's marks for each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r"^```(\w*)$")
_FILE = re.compile(r"^# ([\w./-]+\.(?:py|yaml|toml))$")
_MARKER = re.compile(r"^<!-- (not run|wrong on purpose)(?:: (.+))? -->$")


@attrs.frozen
class Block:
    """A fenced block.

    Attributes:
        language: The language of the fence.
        text: The content, with a newline at the end.
        line: The number of its first line, from 1.
        file: The file that its first line names, as in `# roles.py`.
        not_run: The reason why the block isn't run; None if it is run.
        wrong: Whether the block shows something that is refused.
        output_of: The index of the block whose output this is; None for any other block.
    """

    language: str
    text: str
    line: int
    file: str | None = None
    not_run: str | None = None
    wrong: bool = False
    output_of: int | None = None


def blocks_of(page: Path) -> list[Block]:
    """Return all blocks of a page, in order."""
    found: list[Block] = []
    for language, lines, line, marker in _fenced(page.read_text(encoding="utf-8").splitlines()):
        named = _FILE.fullmatch(lines[0]) if lines else None
        kind, reason = (marker[1], marker[2]) if marker else (None, None)
        found.append(
            Block(
                language,
                "\n".join([*lines, ""]),
                line,
                file=named[1] if named else None,
                not_run=(reason or "") if kind == "not run" else None,
                wrong=kind == "wrong on purpose",
                output_of=_source(found, language) if kind is None else None,
            )
        )
    return found


def _source(before: list[Block], language: str) -> int | None:
    """Return the index of the block whose output a text block shows."""
    if language != "text" or not before or before[-1].language != "python" or before[-1].file or before[-1].not_run:
        return None
    return len(before) - 1


def _fenced(lines: list[str]) -> Iterator[tuple[str, list[str], int, re.Match[str] | None]]:
    start: tuple[str, int] | None = None
    marker: re.Match[str] | None = None
    for index, line in enumerate(lines):
        fence = _FENCE.fullmatch(line)
        if start is None and fence:
            start = fence[1], index + 1
        elif start is not None and line == "```":
            yield start[0], lines[start[1] : index], start[1] + 1, marker
            start = marker = None
        elif start is None and line:
            marker = _MARKER.fullmatch(line)
    assert start is None, f"a block that begins in line {start and start[1]} never ends"

"""How much code core is, by package: `python -m tests.ceiling` fails where that is more than tests/ceiling.txt allows.

Counted are lines with code (comments, docstrings and empty lines aren't), tokens on such a line, and functions. The
ceiling only falls: `python -m tests.ceiling lower` writes what there is, where that is less.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".txt")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """How much code something is."""

    lines: int
    tokens_per_line: float
    functions: int

    def at_most(self, most: Size) -> Size:
        """Return the lower number of each kind."""
        return Size(
            min(self.lines, most.lines),
            min(self.tokens_per_line, most.tokens_per_line),
            min(self.functions, most.functions),
        )


def size_of(files: Iterable[Path]) -> Size:
    """Return how much code some files are."""
    lines = tokens = functions = 0
    for path in files:
        tree = ast.parse(path.read_bytes())
        texts = {
            (node.value.lineno, node.value.col_offset)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        }
        functions += sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(tree))
        with tokenize.open(path) as file:
            found = [
                each
                for each in tokenize.generate_tokens(file.readline)
                if each.type not in _NO_CODE and each.start not in texts
            ]
        tokens += len(found)
        lines += len({line for each in found for line in range(each.start[0], each.end[0] + 1)})
    return Size(lines, round(tokens / max(1, lines), 1), functions)


def packages(core: Path) -> dict[str, Size]:
    """Return how much code each package of a folder is, and each below `colocate`; modules there are one row.

    `testing` is left out: tests are no reason to keep a suite small.
    """
    files = defaultdict(list)
    for path in sorted(core.rglob("*.py")):
        top, *below = path.relative_to(core).parts
        if below[0] != "testing":
            files[f"{top}/{below[0]}" if top == "colocate" and below[1:] else top].append(path)
    return {name: size_of(paths) for name, paths in files.items()}


def read(table: str) -> dict[str, Size]:
    """Return the rows of a table: package, lines, tokens per line, functions."""
    rows = [line.split() for line in table.splitlines() if line and not line.startswith("#")]
    return {name: Size(int(lines), float(tokens), int(functions)) for name, lines, tokens, functions in rows}


def written(rows: Mapping[str, Size]) -> str:
    """Return a table as it is read."""
    head = f"# {'package':22} {'lines':>6} {'tokens per line':>16} {'functions':>10}\n"
    return head + "".join(f"{name:24} {row[0]:6} {row[1]:16} {row[2]:10}\n" for name, row in rows.items())


def above(found: Mapping[str, Size], ceiling: Mapping[str, Size]) -> list[str]:
    """Return what is above a ceiling, in words; a package that has none is above it."""
    none = Size(0, 0.0, 0)
    return [
        f"{name} has {now} {what.replace('_', ' ')}, and its ceiling is {most}: less will do, or raise it in the same "
        "commit with its reason (tests/ceiling.txt)"
        for name, row in found.items()
        for what, now, most in zip(Size._fields, row, ceiling.get(name, none), strict=True)
        if now > most
    ]


def main(arguments: list[str]) -> int:
    """Say what is above the ceiling, or lower that."""
    found, ceiling = packages(ROOT / "core"), read(TABLE.read_text())
    if arguments == ["lower"]:
        least = {name: found[name].at_most(most) for name, most in ceiling.items() if name in found}
        TABLE.write_text(written(least))
        return 0
    print(*(wrong := above(found, ceiling)), sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

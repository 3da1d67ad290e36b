"""Compare the number of tokens of the code with a commit's: `python -m tests.ceiling --since BASE`.

Comments, docstrings and line ends don't count. BASE is read from git, so that no commit can raise the limit; the
Makefile names BASE in one line, which changes only with an issue's text.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "core/colocate/testing/": "suites",
    "core/colocate_run/": "run",
    "core/colocate_report/": "report",
    "core/": "core",
    "executors/": "executors",
    "plugins/": "plugins",
    "tests/": "tests",
}
"""Packages by folder. A file belongs to the first matching folder."""
LIMITS = {("core", "run", "report"): 100, ("suites", "tests"): 100}
"""Upper limits for the sum of some packages, in percent of the base."""
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count_tokens(source: bytes) -> int:
    """Return the number of tokens of a module, without comments and docstrings."""
    docstrings = {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    tokens = tokenize.tokenize(io.BytesIO(source).readline)
    return sum(token.type not in _NO_CODE and token.start not in docstrings for token in tokens)


def count_by_package(files: Iterable[tuple[str, bytes]]) -> Counter[str]:
    """Return the number of tokens of each package of `FOLDERS`, from paths below the root and contents."""
    counts: Counter[str] = Counter()
    for path, source in files:
        package = next((name for folder, name in FOLDERS.items() if path.startswith(folder)), None)
        if package is not None and path.endswith(".py"):
            counts[package] += count_tokens(source)
    return counts


def files_of_commit(commit: str, root: Path) -> list[tuple[str, bytes]]:
    """Return paths and contents of a commit's files.

    Raises:
        SystemExit: Git doesn't know the commit; the text says what to do.
    """
    command = ["git", "archive", commit, *sorted({folder.split("/")[0] for folder in FOLDERS})]
    archive = subprocess.run(command, cwd=root, capture_output=True)
    if archive.returncode:
        raise SystemExit(
            f"{commit} can't be read from git: {archive.stderr.decode().strip()}. A shallow clone lacks it: "
            "git fetch --unshallow"
        )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        members = [member for member in tar.getmembers() if member.isfile() and member.name.endswith(".py")]
        return [(member.name, extracted.read()) for member in members if (extracted := tar.extractfile(member))]


def files_of_checkout(root: Path) -> list[tuple[str, bytes]]:
    """Return paths and contents of the modules of a checkout, whether git tracks them or not."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    paths = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout.split("\0")
    return [(path, (root / path).read_bytes()) for path in paths if path and (root / path).is_file()]


def table(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Return a table with a row for each package, and for each sum of packages with a limit."""
    rows = [(name,) for name in dict.fromkeys(FOLDERS.values())]
    lines = [f"{'tokens':20} {'base':>9} {'now':>9}"]
    for names in [*rows, *LIMITS]:
        old, new = (sum(counts[name] for name in names) for counts in (before, now))
        share = f"{100 * new / old:6.1f} %" if old else ""
        lines.append(f"{' + '.join(names):20} {old:9,} {new:9,} {share}")
    return "\n".join(lines)


def above(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return a sentence for each limit that is exceeded."""
    return [
        f"{' + '.join(names)}: {new:,} tokens are more than {percent} % of the base's {old:,}: take something out"
        for names, percent in LIMITS.items()
        for old, new in [[sum(counts[name] for name in names) for counts in (before, now)]]
        if new > old * percent / 100
    ]


def main(arguments: list[str]) -> int:
    """Print the table; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m tests.ceiling", description="Compare tokens with a commit's.")
    parser.add_argument("--since", metavar="BASE", required=True, help="the commit")
    commit = parser.parse_args(arguments).since
    before, now = count_by_package(files_of_commit(commit, ROOT)), count_by_package(files_of_checkout(ROOT))
    print(table(before, now))
    print(*(excess := above(before, now)), sep="\n", end="\n" if excess else "")
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

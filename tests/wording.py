"""How docstrings, comments and names read, counted: `python -m tests.wording` refuses packages that got worse.

A pronoun or a clause in the place of a noun hides the noun, and a participle is no name for a thing. The counts are a
smoke alarm: a sentence that hides its noun without one of these words is no better.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {
    "core/colocate": (5, 0, 5, 1),
    "core/colocate_run": (2, 0, 4, 1),
    "core/colocate_report": (4, 0, 5, 2),
    "executors": (1, 0, 1, 1),
    "plugins": (3, 0, 3, 1),
}
"""Percent of vague docstrings, causative docstrings, vague comments, and names that are no nouns, by package."""
_VAGUE = re.compile(
    r"\b(it|its|them|they|that of|those of|those that|whoever|who|whose|what|so many|so much|as such|likewise|"
    r"the like|of that|for that|by that|with that|in that|which has)\b",
    re.IGNORECASE,
)
_CAUSATIVE = re.compile(r"^(have|hear|let|see to)\b", re.IGNORECASE)
_NO_NOUNS = re.compile(
    r"found|told|said|given|wanted|each|its|own|what|who|whose|ahead|beside|left|made|kept|seen|known|taken|asked|came|"
    r"gone|there|others|those|here|so"
)
_DIRECTIVES = ("# type", "# noqa", "#!", "# --", "# pyright", "# pragma", "# mypy", "# fmt")


def count_words(source: str) -> Counter[str]:
    """Return how many docstrings, comments and names a module has, and how many of them read badly."""
    counts: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(node):
                sentence = re.split(r"(?<=[.!?])\s", docstring.split("\n\n")[0].replace("\n", " "))[0]
                counts["docstrings"] += 1
                counts["vague docstrings"] += bool(_VAGUE.search(sentence))
                counts["causative docstrings"] += bool(_CAUSATIVE.search(sentence))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counts["names"] += 1
            counts["names that are no nouns"] += _NO_NOUNS.fullmatch(node.id) is not None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(_DIRECTIVES):
            counts["comments"] += 1
            counts["vague comments"] += bool(_VAGUE.search(token.string))
    return counts


def shares(counts: Counter[str]) -> dict[str, float]:
    """Return the percent of each bad kind in its kind."""
    kinds = {"vague docstrings": "docstrings", "causative docstrings": "docstrings", "vague comments": "comments"}
    kinds["names that are no nouns"] = "names"
    return {bad: 100 * counts[bad] / (counts[kind] or 1) for bad, kind in kinds.items()}


def main() -> int:
    """Print the shares of each package; return 1 if one is above its limit."""
    status = 0
    for package, limits in LIMITS.items():
        files = [path for path in (ROOT / package).rglob("*.py") if "testing" not in path.parts]
        measured = shares(sum((count_words(path.read_text(encoding="utf-8")) for path in files), Counter()))
        for (kind, share), limit in zip(measured.items(), limits, strict=True):
            note = "" if share <= limit else '; see "Words" in CONTRIBUTING.md'
            status |= bool(note)
            print(f"{package:22} {kind:24} {share:5.1f} % of at most {limit} %{note}")
    return status


if __name__ == "__main__":
    sys.exit(main())

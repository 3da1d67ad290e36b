"""A docstring's first sentence begins with a verb or a noun, not with a pronoun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRONOUN = re.compile("it|its|he|she|they|their|theirs|them|others|ones|itself|themselves")
BEFORE_NOUN = re.compile("this|that|these|those|one|all|each|some|any|none|both|such|another")
NO_NOUN = re.compile(
    "[^a-z`].*||a|an|the|of|in|with|without|to|on|for|by|at|as|from|about|beside|behind|below|above|between|after|before|than|"
    "is|are|was|were|has|have|had|may|can|must|will|goes|go|does|do|ends|runs|comes|come|made|given|needs|needed|that|who|"
    "which|whose|what|where|when|it|its|they|their|this|these|those|there|nobody|and|or|but|so|more|also|else|together"
)
CLAUSE = re.compile("what|who|whose|which|whoever|whatever")


def begins_with_pronoun(docstring: str, is_function: bool = False) -> bool:
    """Return whether a docstring's first sentence begins with a pronoun or, of a function, with a clause."""
    first = re.split(r"(?<=[.:;])\s", docstring.strip(), maxsplit=1)[0]
    word, *rest = [re.sub("'.*", "", each).strip(".").lower() for each in re.findall(r"[\w'`@.-]+|[,:;()]", first)]
    if BEFORE_NOUN.fullmatch(word):  # "All ranks", "One slot of a pool"
        return NO_NOUN.fullmatch(rest[0] if rest else "") is not None
    return PRONOUN.fullmatch(word) is not None or (is_function and CLAUSE.fullmatch(word) is not None)


def docstrings(tree: ast.AST) -> Iterator[tuple[str, str, bool]]:
    """Yield each definition's name and docstring, and whether it is a function that isn't a test.

    A test's docstring says a law, as in "What can never fit is an error at once".
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = getattr(node, "name", "the module")
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not name.startswith("test_")
            if (docstring := ast.get_docstring(node)) is not None:
                yield name, docstring, is_function


@pytest.mark.parametrize("folder", ["core", "executors", "plugins"])
def test_no_docstring_begins_with_a_pronoun(folder: str) -> None:
    assert [
        f"{path.relative_to(ROOT)}: {name}: {docstring.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, docstring, is_function in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if begins_with_pronoun(docstring, is_function)
    ] == []


@pytest.mark.parametrize("folder", ["core", "executors", "plugins", "tests"])
def test_no_docstring_has_a_section_twice(folder: str) -> None:
    assert [
        f"{path.relative_to(ROOT)}: {name}: {section} twice"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, docstring, _ in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        for section in ("Args", "Attributes", "Returns", "Yields", "Raises")
        if len(re.findall(rf"^{section}:$", docstring, re.MULTILINE)) > 1
    ] == []

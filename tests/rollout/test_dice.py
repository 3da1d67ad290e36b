"""The engine of the page for users: it is one, by the suite that the page names."""

import ast
from typing import Any

from tests.docs.blocks import ROOT, blocks_of

from colocate_rollout.testing import EngineSuite


def written() -> Any:
    """Return the class as the page has it, and run nothing else of that."""
    first, *_ = blocks_of(ROOT / "docs" / "engines.md")
    parsed = ast.parse(first.text)
    parsed.body = [each for each in parsed.body if isinstance(each, ast.Import | ast.ImportFrom | ast.ClassDef)]
    found: dict[str, Any] = {"__name__": "page"}
    exec(compile(parsed, "engines.md", "exec"), found)
    return found["Dice"]


class TestDice(EngineSuite):
    """It generates without a model."""

    engine = written()

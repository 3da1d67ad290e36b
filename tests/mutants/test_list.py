"""The list of mutants fits the tree: the mutants' texts and tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
SUITES = ("core/colocate/testing", "tests/suite")
ENOUGH = 8  # mutants of each area


ALL = [each for some in MUTANTS.values() for each in some]


def test_the_list_is_of_this_tree() -> None:
    """Each mutant's text occurs in its file once, the mutated file parses, and the mutant's test exists."""
    suite = "".join(path.read_text(encoding="utf-8") for folder in SUITES for path in (ROOT / folder).rglob("*.py"))
    for mutant in ALL:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, mutant.name
        ast.parse(text.replace(mutant.old, mutant.new))
        file, *of_class, name = mutant.test.partition("[")[0].split("::")
        tests = (ROOT / file).read_text(encoding="utf-8")
        if of_class:  # a test of the suite, which this class runs
            assert f"class {of_class[0]}(ExecutorSuite):" in tests, mutant.name
            tests = suite
        assert re.search(rf"^ *def {name}\(", tests, re.MULTILINE), mutant.name


def test_all_areas_have_some() -> None:
    """Each area has enough mutants, and each mutant a name of its own."""
    assert min(map(len, MUTANTS.values())) >= ENOUGH
    assert len({each.name for each in ALL}) == len(ALL) >= 40

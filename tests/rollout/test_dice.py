"""The engine of the page for users passes the suite that the page names, and refuses wrong calls."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.blocks import ROOT, blocks_of

import colocate
from colocate import ConfigError, DispatchError, RoleError
from colocate_rollout.role import EngineRole
from colocate_rollout.testing import EngineSuite


def source() -> str:
    """Return the source of the page's class and its imports."""
    first, *_ = blocks_of(ROOT / "docs" / "engines.md")
    parsed = ast.parse(first.text)
    parsed.body = [each for each in parsed.body if isinstance(each, ast.Import | ast.ImportFrom | ast.ClassDef)]
    return ast.unparse(parsed)


def written() -> Any:
    found: dict[str, Any] = {"__name__": "page"}
    exec(source(), found)
    return found["Dice"]


class TestDice(EngineSuite):
    """The page's engine, which has no model, passes the suite."""

    engine = written()


WITHOUT_TORCH = """
import sys
for name in ("torch", "numpy", "transformers"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]]))
"""


def test_without_torch(tmp_path: Path) -> None:
    """The suite runs without torch, numpy and transformers."""
    suite = "from colocate_rollout.testing import EngineSuite\nclass TestDice(EngineSuite):\n    engine = Dice\n"
    (tmp_path / "test_dice.py").write_text(f"{source()}\n{suite}")
    words = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "test_dice.py")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.fixture(scope="module")
def views() -> Iterator[list[Any]]:
    """Return a view of a role in a group, and a role outside any worker."""
    with colocate.spawn({"rollout": colocate.role(EngineRole, written())}, slots=2) as group:
        yield [group.role("rollout", EngineRole), EngineRole(written())]


PROMPTS: list[tuple[Any, str]] = [
    (None, r"generate\(prompts=\.\.\.\) is None, and no list of prompts, each a list of token ids"),
    ("57", "is str, and no list of prompts"),
    ({"a": [1]}, "is dict, and no list of prompts"),
    (5, r"prompts \(int\) has no rows"),
    ([5, 6], "prompt 0 is int, and no list of token ids"),
    ([[1], None], "prompt 1 is None, and no list of token ids"),
    (["57"], "prompt 0 is str, and no list of token ids"),
    ([[1.5]], "prompt 0 is list, and no list of token ids .*float"),
    (torch.tensor([[1.5]]), "prompt 0 is Tensor, and no list of token ids"),
]


@pytest.mark.parametrize(("prompts", "said"), PROMPTS, ids=str)
def test_no_prompts(prompts: Any, said: str, views: list[Any]) -> None:
    """Prompts that are no lists of token ids are refused with their type, in a group and outside any worker."""
    for view in views:
        for generate in (view.generate, lambda given, view=view: [*view.generate.stream(given)]):
            with pytest.raises((DispatchError, RoleError), match=said):
                generate(prompts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples": None}, r"generate\(samples=None\): a whole number, at least 1"),
        ({"samples": "2"}, r"generate\(samples='2'\)"),
        ({"samples": 0}, r"generate\(samples=0\)"),
        ({"sampling": 5}, "sampling=5: a Sampling, or a mapping"),
    ],
    ids=str,
)
def test_wrong_options_of_a_call(options: dict[str, Any], said: str, views: list[Any]) -> None:
    """A wrong `samples` or `sampling` is refused by name."""
    for view in views:
        with pytest.raises((ConfigError, RoleError), match=said):
            view.generate([[1]], **options)

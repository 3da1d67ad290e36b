"""The configs of README, pages and examples learn as much as is shown beside each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.blocks import PAGES, ROOT, blocks_of

EXAMPLES = ROOT / "docs" / "examples"
README, ROLLOUTS = ROOT / "README.md", ROOT / "docs" / "rollouts.md"
# The metric whose first and last values are shown beside a config.
SHOWN = {
    (README, "grpo.yaml"): "eval_accuracy",
    (ROLLOUTS, "vowels.yaml"): "reward",
    (EXAMPLES, "grpo.yaml"): "eval_accuracy",
    (EXAMPLES, "ppo.yaml"): "eval_accuracy",
    (EXAMPLES, "ppo-small.yaml"): "eval_accuracy",
    (EXAMPLES, "ppo-fsdp2.yaml"): "eval_accuracy",
}
ELSEWHERE = {(EXAMPLES, "grpo-vllm.yaml"): "it needs vLLM; tests/rollout/test_vllm.py runs it"}


def trained() -> set[tuple[Path, str]]:
    """Return the configs with a job that trains, each with its page, or the folder of examples."""
    pages = {
        (page, str(block.file))
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "yaml" and re.search(r"use: (grpo|ppo)\.train", block.text)
    }
    examples = {
        (EXAMPLES, path.name)
        for path in EXAMPLES.glob("*.yaml")
        if re.search(r"use: (grpo|ppo)\.train", path.read_text(encoding="utf-8"))
    }
    return pages | examples


def text_of(place: Path, name: str) -> tuple[str, str]:
    """Return a config, and the text that shows its metrics: the rest of a page, or the whole example."""
    if place.is_dir():
        text = (place / name).read_text(encoding="utf-8")
        return text, text
    (block,) = [each for each in blocks_of(place) if each.file == name]
    return block.text, place.read_text(encoding="utf-8").partition(block.text)[2]


def test_all_are_known() -> None:
    assert trained() == SHOWN.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize(("place", "name"), SHOWN, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_shown_metric_improves(place: Path, name: str) -> None:
    """Each config shows two numbers of its metric, and the second one is much better."""
    first, last = shown(place, name)
    assert last > first + 0.3


def shown(place: Path, name: str) -> tuple[float, float]:
    metric = rf"\b{SHOWN[place, name]}`? (?:rises from (0\.\d+) to )?(0\.\d+)"
    numbers = [float(each) for pair in re.findall(metric, text_of(place, name)[1]) for each in pair if each]
    return numbers[0], numbers[-1]


@pytest.mark.long
@pytest.mark.parametrize(("place", "name"), SHOWN, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_config_learns_as_shown(place: Path, name: str, tmp_path: Path) -> None:
    """Each config, as it stands, learns as much as is shown beside it."""
    for block in blocks_of(place) if place.is_file() else ():
        if block.file is not None and block.file.endswith(".py"):  # modules that a config names
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    (tmp_path / name).write_text(text_of(place, name)[0], encoding="utf-8")
    command = [sys.executable, "-m", "colocate", "run", name, "--set", "name=learns"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = (tmp_path / "runs" / "learns" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [row[SHOWN[place, name]] for row in map(json.loads, lines) if SHOWN[place, name] in row]
    assert values[-1] > values[0] + 0.3
    assert [values[0], values[-1]] == pytest.approx(shown(place, name), abs=0.15)

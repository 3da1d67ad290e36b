"""What is printed in the end: every figure beside what it is to be at most."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.chaos import __main__, report
from tests.chaos.ledger import Ledger


def test_percentiles() -> None:
    """Of few values and of many."""
    assert report.percentiles([7.0]) == "7 / 7 / 7 / 7"
    assert report.percentiles(range(1000, -1, -1)) == "500 / 900 / 990 / 1000"


def test_all_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds, what was hit, what there is none of, and what went wrong; only of that the exit status is made."""
    path = tmp_path / "chaos.json"
    ledger = Ledger.open(path)
    tally = ledger.tally("dask", "drop")
    tally.tried, tally.survived, tally.seeds = 3, 2, [3, 8, 13]
    tally.count("lane")
    tally.turns = 4
    ledger.save()
    arguments = ["--show", "--ledger", str(path)]
    assert __main__.main(arguments) == 0
    ledger.problem("dask", "drop", 8, "left", "process 7 is left")
    ledger.save()
    assert __main__.main(arguments) == 1
    text = capsys.readouterr().out
    assert "dask drop: seeds 3-13; hit: lane 1" in text
    assert "dask: faults where roles take turns: 4" in text
    assert "dask: not applicable: envoy" in text
    assert "dask seed 8 (drop): left: process 7 is left" in text
    assert json.loads(path.read_text())["executors"]["dask"]["drop"]["left"] == 1

"""What is printed in the end: every figure beside what it is to be at most."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.chaos import __main__, report
from tests.chaos.ledger import Ledger


def printed(ledger: Ledger) -> str:
    out = io.StringIO()
    report.show(ledger, Console(file=out, width=200))
    return out.getvalue()


def test_percentiles() -> None:
    """Of few values and of many."""
    assert report.percentiles([7.0]) == "7 / 7 / 7 / 7"
    assert report.percentiles(range(1000, -1, -1)) == "500 / 900 / 990 / 1000"


def test_bars() -> None:
    """One that is missed is told as such; of what hasn't been measured nothing is said."""
    ledger = Ledger()
    ledger.tally("local", "kill").error_ms = [1.0, 2.0, 900.0]
    ledger.tally("local", "stop").over_ms = [-300.0, 999.0]
    ledger.tally("local", "gil").over_ms = [1001.0]
    ledger.tally("ray", "driver").free_ms = [2000.0]
    met = {str(bar): bar.met for name in ("local", "ray") for bar in report.bars(ledger.tallies[name])}
    assert met == {
        "SIGKILL of a worker to the first error, p50: 2 ms, at most 40: PASS": True,
        "SIGKILL of a worker to the first error, p99: 900 ms, at most 500: OVER": False,
        "close with a hung rank beside its grace, the slowest: 1001 ms, at most 1000: OVER": False,
        "SIGKILL of a driver until all is free, the slowest: 2000 ms, at most 2000: PASS": True,
    }
    assert all(line in printed(ledger) for line in met)


def test_all_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds, what was hit, what there is none of, and what went wrong; only of that the exit status is made."""
    path = tmp_path / "chaos.json"
    ledger = Ledger.open(path)
    tally = ledger.tally("dask", "drop")
    tally.tried, tally.survived, tally.seeds = 3, 2, [3, 8, 13]
    tally.count("lane")
    tally.trained = {"done": 5, "after": 2}
    tally.turns = 4
    ledger.save()
    arguments = ["--show", "--ledger", str(path)]
    assert __main__.main(arguments) == 0
    ledger.problem("dask", "drop", 8, "left", "process 7 is left")
    ledger.save()
    assert __main__.main(arguments) == 1
    text = capsys.readouterr().out
    assert "dask drop: seeds 3-13; hit: lane 1" in text
    assert "dask: steps of training: 5 done; failed on a rank: 0 before the forward pass" in text
    assert "2 after the last collective" in text
    assert "dask: faults where roles take turns: 4" in text
    assert "dask: not applicable: envoy" in text
    assert "dask seed 8 (drop): left: process 7 is left" in text
    assert json.loads(path.read_text())["executors"]["dask"]["drop"]["left"] == 1

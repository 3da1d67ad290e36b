"""The bench itself: what it says of its numbers. None of them is asserted here."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.bench import scale
from tests.bench.__main__ import main
from tests.bench.measure import Rounds, side_by_side
from tests.bench.rows import Row, show
from tests.bench.stub import StubExecutor

import colocate
from colocate import Runtime
from colocate._api.connection import Connection
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows


def test_verdicts() -> None:
    """A number passes up to its bar, and without one nothing is said of it."""
    verdicts = [Row("part", "row", value, "µs", bar).verdict for value, bar in ((2, 2), (2.1, 2), (9, None))]
    assert verdicts == ["PASS", "over", ""]


def test_table() -> None:
    """The table has each row with its bar and verdict, under its part."""
    file = io.StringIO()
    rows = [Row("first", "quick", 1.5, "µs", 2), Row("first", "slow", 300, "µs", 2), Row("second", "free", 7, "x")]
    show(rows, Console(file=file, width=100))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in file.getvalue().splitlines() if "│" in line]
    assert lines == [
        ["first", "", "", ""],
        ["quick", "1.50 µs", "<= 2 µs", "PASS"],
        ["slow", "300 µs", "<= 2 µs", "over"],
        ["second", "", "", ""],
        ["free", "7 x", "", ""],
    ]


def test_turns() -> None:
    """Functions take turns, each as often as the other, and the first turn doesn't count."""
    turns: list[str] = []
    timed = side_by_side({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, rounds=2, calls=2)
    assert "".join(turns) == "aabb" * 3
    assert [len(found.medians) for found in timed.values()] == [2, 2]


def test_ratio() -> None:
    """A ratio is the median of the rounds' own: a round that was slow for both changes nothing."""
    assert Rounds([2, 20, 3]).over(Rounds([1, 10, 3])) == 2
    assert Rounds([2, 20, 3]).least == 2


@pytest.mark.usefixtures("no_leaks")
def test_stub() -> None:
    """The stub executor is an executor: groups start, answer calls on all of their slots, keep, and close."""
    with Runtime._of(Connection("stub", StubExecutor(), 0, False, None, 60.0, None, None)) as runtime:
        pool = runtime.reserve(slots=300)
        group = pool.spawn({"echo": colocate.role(Echo), "rows": colocate.role(Rows).on(slots=range(299, 99, -1))})
        rows = group.role("rows", Rows)
        assert group.role("echo", Echo).noop() == [None] * 300
        assert len(rows.seen(rows.double.keep(list(range(200))).ref)) == 200
        assert len(runtime._node.services.executor.running()) == 300
        group.close()
        assert runtime._node.services.executor.running() == []


def test_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` writes what the table shows; a part that isn't there is an error that lists those that are."""
    monkeypatch.setattr(scale, "rows", lambda: [Row("part", "measured", 1.5, "µs", 2)])
    main(["scale", "--json", str(tmp_path / "bench.json")])
    assert "measured" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "bench.json").read_text())
    assert row == {"part": "part", "name": "measured", "value": 1.5, "unit": "µs", "bar": 2, "verdict": "PASS"}
    with pytest.raises(SystemExit):
        main(["scales"])
    assert "calls, before, definitions, residents, scale, memory, ledger, sleep, budget, ppo" in capsys.readouterr().err

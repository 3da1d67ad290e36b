"""Learning curves: the choice of large charts, shared axes, and lines that show their gaps and ranges."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from colocate_report.curves import HEIGHT, WIDTH, Chart, Curves, collect_series, headline_series, make_curves


def drawn(*rows: Mapping[str, Any]) -> Curves:
    return make_curves(collect_series(rows))


def labels(chart: Chart) -> list[str]:
    return [line.label for line in chart.lines]


def places(path: str) -> list[tuple[int, int]]:
    return [(int(x), int(y)) for x, y in re.findall(r"(\d+) (\d+)", path)]


class TestWhichAreLarge:
    def test_held_out_results_come_first_then_rewards_then_successes(self) -> None:
        names = ["loss", "accuracy", "kl", "reward", "eval_score", "eval_accuracy"]
        found = headline_series(collect_series([dict.fromkeys(names, 0.5) | {"step": 1}]))
        assert [each.name for each in found] == ["eval_accuracy", "eval_score", "reward", "accuracy"]

    def test_fractions_share_axis_from_0_to_1(self) -> None:
        found = drawn(*({"step": n, "eval_accuracy": n / 10, "accuracy": n / 20, "return": n * 40} for n in range(10)))
        assert [labels(chart) for chart in found.large] == [["Held-out accuracy", "Accuracy"], ["Return"]]
        assert [label for _, label in found.large[0].y_ticks] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
        assert [line.strong for line in found.large[0].lines] == [True, False]


class TestLines:
    def test_line_goes_through_points(self) -> None:
        (chart,) = drawn({"step": 0, "loss": 0.0}, {"step": 5, "loss": 1.0}, {"step": 10, "loss": 0.5}).large
        (line,) = chart.lines
        assert places(line.path) == places(line.dots) == [(0, HEIGHT), (WIDTH // 2, 0), (WIDTH, HEIGHT // 2)]
        assert chart.summary == "Steps 0 to 10: Loss from 0 to 0.5."

    def test_nonfinite_value_is_gap(self) -> None:
        """A value that isn't finite is a gap in the line, and as a last value isn't replaced by an earlier one."""
        for bad in (None, math.nan, math.inf, -math.inf):
            values = [0.0, 1.0, bad, 0.5, 0.0]
            (chart,) = drawn(*({"step": step, "loss": value} for step, value in enumerate(values))).large
            assert chart.lines[0].path.count("M") == 2
            assert len(places(chart.lines[0].path)) == 4
        found = drawn(*({"step": step, "reward": value} for step, value in enumerate((0.5, math.nan, 0.7, math.inf))))
        assert found.large[0].lines[0].last == "not finite"
        assert found.gaps == ("Reward was no finite number 2 of 4 times, first at step 1.",)

    def test_a_constant_and_a_single_point_are_drawn_inside(self) -> None:
        for rows in ([{"step": 3, "loss": 2.0}], [{"step": n, "loss": -1e9} for n in range(3)]):
            (chart,) = drawn(*rows).large
            assert all(0 < y < HEIGHT for _, y in places(chart.lines[0].path))
            assert all(0 <= at <= 100 for at, _ in (*chart.x_ticks, *chart.y_ticks))

    def test_many_points_become_mean_and_range(self) -> None:
        rows = [{"step": n, "loss": 5.0 if n == 777 else n % 2} for n in range(20_000)]
        (chart,) = drawn(*rows).large
        (line,) = chart.lines
        assert len(places(line.path)) == 300
        assert chart.y_ticks[-1] == (0.0, "5")
        assert min(y for _, y in places(line.band)) == 0, "the one outlier is in the range"
        assert max(y for _, y in places(line.band)) == HEIGHT
        ordinary = [y for x, y in places(line.path) if x > WIDTH // 10]
        assert all(y == pytest.approx(HEIGHT * 0.9, abs=5) for y in ordinary)

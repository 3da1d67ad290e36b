"""Parts of the page: numbers, times, memory, the ownership graph, and readable colours."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st
from tests.report.sample import Page, graph, record

from colocate_report.ownership import ownership_tree
from colocate_report.scale import Axis, format_duration, format_number, format_offset, humanize, make_time_ticks

ROLES = {"actor": 0, "critic": 1}
FLOATS = st.floats(-1e12, 1e12)


class TestNumbers:
    def test_as_text(self) -> None:
        for value, text in [(0, "0"), (1234567, "1,234,567"), (0.123456, "0.1235"), (-0.5, "\u22120.5")]:
            assert format_number(value) == text
        for seconds, text in [
            (0, "0 ms"),
            (0.00042, "0.42 ms"),
            (0.9999, "1 s"),
            (59.96, "1 min 0 s"),
            (3723, "1 h 2 min"),
        ]:
            assert format_duration(seconds) == text
        for name, text in [("eval_accuracy", "Held-out accuracy"), ("kl", "KL"), ("_", "_")]:
            assert humanize(name) == text
        assert humanize("policy/grad_norm") == "Policy gradient norm"

    def test_an_axis_of_time_has_one_unit(self) -> None:
        assert [label for _, label in make_time_ticks(0.25, 5)] == [
            "0 ms",
            "50 ms",
            "100 ms",
            "150 ms",
            "200 ms",
            "250 ms",
        ]
        assert make_time_ticks(600, 3) == ((0.0, "0 min"), (50.0, "5 min"), (100.0, "10 min"))
        assert format_offset(7200, 36_000) == "2 h"
        assert make_time_ticks(0.0, 5) == ()

    @example(-989999989749.0, -988999999988.0, 2)
    @example(0.0, 5e-324, 2)
    @example(1e-310, 3e-310, 10)
    @given(FLOATS, FLOATS, st.integers(2, 10))
    def test_an_axis_around_holds_both_ends_with_round_ticks(self, one: float, other: float, count: int) -> None:
        low, high = sorted((one, other))
        axis = Axis.with_round_ends(low, high, count)
        room = 1e-6 * (axis.high - axis.low)
        assert axis.low <= low + room
        assert high - room <= axis.high
        assert 2 <= len(axis.ticks) <= count + 2
        assert len(set(axis.tick_labels())) == len(axis.ticks)
        assert max(map(len, axis.tick_labels())) <= 15


class TestMemory:
    def test_bars_and_a_table(self, tmp_path: Path) -> None:
        """The memory bars and table show each role's part of its process; the table also has the rest."""
        page = Page(tmp_path, record())
        assert "slot 1, cpu: 600 MiB" in page.words("memory")
        bars = page.find("memory", "div", class_="bar")
        assert [["".join(part.itertext()) for part in bar] for bar in bars] == [
            ["actoractor\n8 MiB, 1%", "criticcritic\n2 MiB, < 1%"]
        ] * 2
        first, second, *others = page.rows("memory")
        assert first == ["0", "actor", "0", "2 MiB", "6 MiB", "", "8 MiB", ""]
        assert second == ["0", "critic", "0", "", "", "2 MiB", "2 MiB", ""]
        assert [(row[1], row[6]) for row in others[:2]] == [("(empty worker)", "500 MiB"), ("(other)", "90 MiB")]


class TestOwnership:
    def test_a_tree_with_facts(self) -> None:
        root = ownership_tree(graph(), ROLES)
        assert root is not None
        assert (root.kind, root.name, root.facts) == ("runtime", "local", ("ready", "12.5 s", "demo.yaml:4"))
        workers = root.children[0].children[0].children
        assert [worker.facts for worker in workers] == [
            ("running", "pid 4000", "node 1", "cpu"),
            ("running", "pid 4001", "node 2", "cpu"),
        ]
        roles = workers[1].children
        assert [(each.name, each.facts, each.role) for each in roles] == [
            ("actor", ("Actor", "rank 1/2"), 0),
            ("critic", ("Critic", "rank 1/2"), 1),
        ]


class TestColours:
    """Colours have enough contrast for weak sight, in light and dark schemes (WCAG: 4.5, and 3 for lines)."""

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_contrast(self, scheme: str) -> None:
        colours = palette(scheme)
        texts = [(text, ground) for text in ("ink", "soft", "good", "bad", "c3") for ground in ("page", "card")]
        texts += [("on", f"{kind}{number}") for kind in "rp" for number in range(8)]
        texts += [("tip-ink", "tip")]
        lines = [(f"c{number}", "card") for number in range(4)]
        weak = [pair for pair in texts if contrast(*(colours[name] for name in pair)) < 4.5]
        weak += [pair for pair in lines if contrast(*(colours[name] for name in pair)) < 3]
        assert weak == []

    def test_both_schemes_have_all_colours(self) -> None:
        style = files("colocate_report").joinpath("templates/style.css").read_text()
        used = set(re.findall(r"var\(--([a-z]+\d?(?:-[a-z]+)?)\)", style)) - {"rows", "row", "letters"}
        assert used <= set(palette("light")) == set(palette("dark"))


def palette(scheme: str) -> dict[str, str]:
    style = files("colocate_report").joinpath("templates/style.css").read_text()
    light, dark = re.findall(r":root \{\n(.*?)\}", style, re.DOTALL)[:2]
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", light if scheme == "light" else dark))


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

"""The report page as a whole: self-contained, complete, and robust to any record."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from tests.report.sample import Page, calls, graph, record, totals

from colocate import GroupMemory, RoleMemory, SlotMemory
from colocate_report.calls import KEPT_SPANS, Span
from colocate_report.contention import Handover, RoleUse
from colocate_run.config.source import config_text

PARTS = ["curves", "answers", "times", "timeline", "memory", "ownership", "setup"]
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "ping", "formaction"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(tmp_path_factory.mktemp("report"), record())


def test_page_is_self_contained(page: Page) -> None:
    """The page loads and runs nothing, and its content security policy says so."""
    tags = {element.tag for element in page.root.iter()}
    assert not tags & {"script", "link", "img", "image", "iframe", "object", "embed", "base", "use", "audio", "video"}
    attributes = {name for element in page.root.iter() for name in element.attrib}
    assert not attributes & LOADING
    assert not [name for name in attributes if name.startswith("on")]
    assert not [loads for loads in ("http:", "https:", "url(", "@import") if loads in page.text]
    assert [path.name for path in page.path.parent.iterdir()] == ["report.html"]
    policies = [meta.get("content") for meta in page.root.iter("meta") if meta.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_page_has_all_sections_in_order(page: Page) -> None:
    """The page has all sections in order, and the key figures in its header."""
    assert [section.get("id") for section in page.root.iter("section")] == PARTS
    assert page.root.findtext("./head/title") == "demo \u2013 run report"
    assert page.head("h1") == ["demo"]
    assert page.head("p[@class='verdict']") == ["finished began 2023-11-14 22:13 UTC"]
    assert dict(zip(page.head("dl/div/dt"), page.head("dl/div/dd"), strict=True)) == {
        "Held-out accuracy": "0.18 \u2192 0.88",
        "Reward": "0.33 \u2192 0.9",
        "Last step": "20",
        "Wall time": "20 s",
        "Calls to 4 roles on 2 slots": "300",
        "Seed": "7",
    }


def test_every_picture_has_text(page: Page) -> None:
    pictures = [element for element in page.root.iter() if element.get("role") == "img"]
    assert len(pictures) >= 5
    for picture in pictures:
        assert picture.get("aria-label") or picture.findtext("title")


def test_answers_before_and_after(page: Page) -> None:
    assert page.section("answers").findtext("h2") == "Answers to held-out problems"
    assert list(page.rows("answers")) == [
        ["spell 'sun' backward", "nus", "sun \u2717", "nus \u2713"],
        ["spell 'cat' backward", "tac", "nothing \u2717", "tca \u2717"],
    ]


def test_time_per_phase_role_and_method(page: Page) -> None:
    assert list(page.rows("times")) == [
        ["Warm up", "1 s", "5%"],
        ["Rollout", "9.5 s", "48%"],
        ["Actor update", "8 s", "40%"],
        ["(rest)", "1.5 s", "8%"],  # time outside of the job's phases
    ]
    roles = {row[0]: row[1:] for row in page.rows("times", 1)}
    assert list(roles) == ["actor", "reward", "reference", "critic"]
    assert roles["reward"] == ["800 ms", "4%"]
    methods = list(page.rows("times", 2))
    assert ["actor", "warm_up", "60", "1.8 s", "30 ms", "9%"] in methods
    assert [row[1] for row in methods if row[0] == "actor"] == ["generate", "update", "warm_up"]
    bars = page.find("times", "div", class_="bar")
    assert [re.findall(r"[\d.]+", part.get("style", "")) for part in bars[0]] == [["5.0"], ["47.5"], ["40.0"], ["7.5"]]
    # The six columns of methods need the page's whole width: in half of 1,100 px the last one is hidden.
    assert [len(half.findall(".//table")) for half in page.find("times", "div", class_="columns")] == [2]


def test_all_of_the_time_is_named(tmp_path: Path) -> None:
    """Time outside of phases is shown as rest, unless phases cover all time, or nothing is timed."""
    folders = iter([tmp_path / "all", tmp_path / "start", tmp_path / "none"])

    def phases(**changes: Any) -> list[str]:
        folder = next(folders)
        folder.mkdir()
        return [row[0] for row in Page(folder, record(seconds=20.0, **changes)).rows("times")]

    assert phases(phases={"rollout": 19.95}) == ["Rollout"]
    assert phases(phases={}, start_up=5.0) == ["(start-up)", "(rest)"]
    assert "(rest)" not in phases(phases={})


def test_labels_of_a_nearly_constant_metric(tmp_path: Path) -> None:
    """A nearly constant metric has distinct axis labels, and the plot leaves room for them."""
    values = {"ratio": 1 + 2.0**-52, "entropy": -0.6931471805599, "rate": 2.00000001e-05, "tokens": 1234567.25}
    rows = [{"step": step, **{name: value * (1 + 1e-9 * step) for name, value in values.items()}} for step in range(9)]
    for plot in Page(tmp_path, record(metrics=rows)).find("curves", "div", class_="plot"):
        labels = [each.text or "" for each in plot.iter("span") if each.get("class") == "y"]
        assert len(set(labels)) == len(labels)
        longest = max(map(len, labels))
        assert longest <= 11, labels
        assert plot.get("style") == f"--letters:{longest}"


def test_page_shows_config_and_environment(page: Page) -> None:
    """The page shows the config and the environment, without host names and folders."""
    assert (page.section("setup").findtext(".//pre") or "").startswith("name: demo\nseed: 7\n")
    facts = [(each.findtext("dt"), each.findtext("dd")) for each in page.section("setup").iterfind(".//dl/div")]
    assert facts == [("python", "3.13.1"), ("cpus", "2")]
    assert "somebody" not in page.text
    assert "example.org" not in page.text
    assert "demo.yaml:10" in page.text


@pytest.mark.parametrize("key", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "password", "api_key", "auth"])
def test_secrets_are_hidden(key: str) -> None:
    config = f"name: demo\nseed: 7\npools:\n  main:\n    env:\n      {key}: sesame\n      MODE: open\n"
    shown = config_text(config + "job:\n  with:\n    max_new_tokens: 5\n")
    assert "sesame" not in shown
    assert f"{key}: (hidden)" in shown
    assert "MODE: open" in shown
    assert "max_new_tokens: 5" in shown


HOSTILE = "</td><script>alert('x')</script>&amp;<!-- \"]]>{{ 7*7 }}{% raw %}"


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    span = Span(HOSTILE, 0, HOSTILE, HOSTILE, 1_700_000_001.0, 1_700_000_002.0)
    spans = [span, *(Span(HOSTILE, 1, HOSTILE, HOSTILE, 1_700_000_000.0 + n, 1_700_000_000.5 + n) for n in range(9))]
    answer = "a\x00b\x1b[31mc\x7f\x85\ud800\ufffed\n\te"  # characters that no page can contain become visible
    page = Page(
        tmp_path,
        record(
            name=HOSTILE,
            metrics=[{"step": step, HOSTILE: step / 3} for step in range(5)],
            tables={HOSTILE: [{HOSTILE: HOSTILE, "x": answer, "right": HOSTILE, "after": HOSTILE}]},
            spans=spans,
            totals=totals(spans),
            phases={HOSTILE: 1.0},
            graph=graph(name=HOSTILE, state=HOSTILE, line=HOSTILE),
            config=f"name: {HOSTILE!r}",
            environment={HOSTILE: HOSTILE},
        ),
        error=HOSTILE,
    )
    assert not list(page.root.iter("script"))
    assert page.root.findtext("./body/header/h1") == HOSTILE
    assert page.root.findtext("./body/header/pre") == HOSTILE
    shown = "a\u2400b\u241b[31mc\u2421\ufffd\ufffd\ufffdd\n\te"
    assert list(page.rows("answers")) == [[HOSTILE, shown, HOSTILE, f"{HOSTILE} \u2713"]]
    assert page.words("setup").count(HOSTILE) == 2
    assert page.section("setup").findtext(".//pre") == f"name: {HOSTILE!r}"


NOTHING = {
    "config": "",
    "metrics": (),
    "tables": {},
    "totals": (),
    "spans": (),
    "phases": {},
    "tree": "",
    "graph": "",
    "memory": (),
    "environment": {},
    "seconds": 0.0,
}


def test_a_run_of_nothing(tmp_path: Path) -> None:
    page = Page(tmp_path, record(**NOTHING))
    assert "The job logged no numbers." in page.words("curves")
    assert "The job showed no tables." in page.words("answers")
    assert page.words("times").count("No role was called.") == 1
    assert "No role was called." in page.words("timeline")
    assert "No role held tensors or arrays." in page.words("memory")
    assert "There is no graph of this run." in page.words("ownership")
    assert "There is no config of this run." in page.words("setup")


def test_a_run_that_failed_says_so_first(tmp_path: Path) -> None:
    """The page of a failed run begins with the error, and has the log and the start-up, too."""
    error = "actor.update raised ValueError on rank 1\n\nTraceback in the worker:\n  boom"
    page = Page(tmp_path, record(log="first\n<b>second</b>\n", start_up=3.0), error)
    assert page.root.findtext("./body/header/p/span[@class='state failed']") == "failed"
    assert page.root.findtext("./body/header/pre[@class='error']") == error
    assert page.root.findtext(".//pre[@class='log']") == "first\n<b>second</b>\n"
    assert "(start-up)" in page.text


def test_a_huge_run_stays_a_page_that_opens(tmp_path: Path) -> None:
    slots, names = 100, ["reward", "eval_accuracy", "eval_return", *(f"metric_{number}" for number in range(60))]
    spans = calls(rounds=KEPT_SPANS // slots // 6, slots=slots, warm_ups=4)[:KEPT_SPANS]
    rows = [{"step": step, **dict.fromkeys(names, step * 7919 % 1000 / 1000)} for step in range(3000)]
    long = {"question": HOSTILE * 500, "right": "a", "before": "b" * 9000, "after": "a"}
    page = Page(
        tmp_path,
        record(
            metrics=rows,
            tables={"Answers": [long] * 2000, "More": [{"x": number} for number in range(2000)]},
            spans=spans,
            totals=totals(spans),
            graph=graph(5000),
            config="name: demo\n" + "".join(f"key{number}: value\n" for number in range(20_000)),
        ),
    )
    assert len(page.text.encode()) < 1_500_000
    assert "Only the last 100,000 calls were kept" in page.words("timeline")
    assert "and 52 more slots" in page.words("timeline")
    assert "and 4,976 more workers" in page.words("ownership")
    assert "and 1,800 more rows" in page.words("answers")
    assert "36 more" in page.words("curves")


@pytest.mark.parametrize(("empty", "said"), [(50 << 20, True), (None, False)], ids=["processes", "threads"])
def test_page_shows_processes_saved_by_fusing(tmp_path: Path, empty: int | None, said: bool) -> None:
    """Two slots with two roles each save two processes on an executor with processes; on threads nothing is claimed."""
    roles = tuple(RoleMemory(name, 0, {"parameters": 1}, {}, 0, 0, None, True) for name in ("actor", "critic"))
    slots = tuple(SlotMemory(slot, "a", "cpu", roles, empty, empty, 0, None) for slot in range(2))
    waiting = [RoleUse("policy", "actor", 2.0, {"critic": 0.5}, 0)]
    page = Page(tmp_path, record(memory=(GroupMemory("policy", slots),), contention=waiting)).text
    assert "Who waited for whom" in page
    assert "critic 0.500" in page
    assert "Transferred" not in page
    assert "Awake" not in page
    used = [RoleUse("policy", "actor", 2.0, {}, 1 << 20, 1 << 21, 1.5)]
    page = Page(tmp_path, record(memory=(GroupMemory("policy", slots),), contention=used)).text
    assert "came from other workers" in page
    assert "who isn't asleep as a whole" in page
    assert all(text in page for text in ("1 MiB", "2 MiB", "1.5"))
    text = (
        "Fused, they are 2 processes; with one for each rank of each role there would be 2 more, and an empty one has"
    )
    text += " up to"
    assert (f"{text} 50 MiB." in page) is said
    assert "would have copied" not in page
    mib = 1 << 20
    on_gpus = []
    for slot, used in zip(slots, (600, 500), strict=True):
        gpu = {"allocated": 60 * mib, "reserved": 100 * mib, "used": used * mib, "total": 1000 * mib}
        on_gpus.append(attrs.evolve(slot, device="cuda:0", gpu=gpu))
    page = Page(tmp_path, record(memory=(GroupMemory("policy", tuple(on_gpus)),), contention=waiting)).text
    assert (f"{text} 50 MiB, and 400 MiB of its GPU, a context." in page) is said


def test_page_shows_copies_saved_by_fusing(tmp_path: Path) -> None:
    """The page shows the copies that fusing saved, also if nobody waited."""
    over = [Handover("policy", "actor", "critic", 3 << 20), Handover("policy", "", "reward", 1 << 20)]
    text = (
        "Of kept results, 4 MiB were used where they lay; processes of their own would have copied them: "
        "actor to critic 3 MiB, functions to reward 1 MiB."
    )
    page = Page(tmp_path, record(memory=(), handed_over=over)).text
    assert text in page
    assert "Who waited for whom" not in page
    several = [*over, Handover("other", "actor", "critic", 1 << 20)]
    assert "other: actor to critic 1 MiB." in Page(tmp_path, record(handed_over=several)).text

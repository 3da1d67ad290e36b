"""Made-up run records, and report pages as a parser reads them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

import colocate_report as report
from colocate import GroupMemory, RoleMemory, SlotMemory
from colocate_report.calls import Span, Total
from colocate_report.record import RunRecord

STARTED = 1_700_000_000.0
MIB = 1 << 20
ROUND = [
    ("actor", "generate", 0.3),
    ("reward", "score", 0.02),
    ("reference", "log_probs", 0.05),
    ("critic", "values", 0.05),
    ("critic", "update", 0.2),
    ("actor", "update", 0.3),
]
CONFIG = """\
name: demo
seed: 7
executor:
  use: local
  with: {}
"""


def calls(rounds: int = 20, slots: int = 2, warm_ups: int = 30, group: str = "policy") -> list[Span]:
    """Return the slots' spans: warm-ups, then rounds that all begin with actor.generate after a pause."""
    spans = []
    for slot in range(slots):
        now = STARTED + 0.001 * slot
        for _ in range(warm_ups):
            spans.append(Span(group, slot, "actor", "warm_up", now, now + 0.03))
            now += 0.031
        for _ in range(rounds):
            now += 0.05
            for role, method, seconds in ROUND:
                spans.append(Span(group, slot, role, method, now, now + seconds))
                now += seconds + 0.001
    return spans


def totals(spans: Iterable[Span]) -> tuple[Total, ...]:
    found: dict[tuple[str, str, str], tuple[int, float]] = {}
    for span in spans:
        key = (span.group, span.role, span.method)
        count, seconds = found.get(key, (0, 0.0))
        found[key] = count + 1, seconds + span.end - span.start
    return tuple(Total(*key, *counts) for key, counts in found.items())


def graph(slots: int = 2, **more: Any) -> str:
    workers = [
        {
            "kind": "worker",
            "name": str(slot),
            "state": "running",
            "pid": 4000 + slot,
            "node": f"host-{slot % 2}.example.org",
            "device": "cpu",
            "children": [
                {"kind": "role", "name": f"{role} rank {slot}/{slots}", "state": role.title(), "children": []}
                for role in ("actor", "critic")
            ],
        }
        for slot in range(slots)
    ]
    group = _owner("group", "policy", 10, workers)
    return json.dumps(_owner("runtime", "local", 4, [_owner("pool", "main", 7, [group])]) | more)


def _owner(kind: str, name: str, line: int, children: list[dict[str, Any]]) -> dict[str, Any]:
    line_of_code = f"/home/somebody/work/demo.yaml:{line}"
    return {"kind": kind, "name": name, "state": "ready", "age_s": 12.5, "line": line_of_code, "children": children}


def memory(slots: int = 2, **roles: dict[str, int]) -> GroupMemory:
    """Return a group's memory on processes of 600 MiB; roles have 8 and 2 MiB by default."""
    held = roles or {"actor": {"parameters": 2 * MIB, "optimizer": 6 * MIB}, "critic": {"tensors": 2 * MIB}}
    return GroupMemory(
        "policy",
        tuple(
            SlotMemory(
                slot,
                "somewhere.example.org",
                "cpu",
                tuple(RoleMemory(role, slot, kinds, {}, 0, 0, None, True) for role, kinds in held.items()),
                600 * MIB,
                500 * MIB,
                0,
                None,
            )
            for slot in range(slots)
        ),
    )


def record(**changes: Any) -> RunRecord:
    """Return the record of a run that learned, with changed fields."""
    spans = tuple(calls())
    rows: list[dict[str, Any]] = [{"step": 0, "eval_accuracy": 0.18, "seconds": {"warm_up": 1.0}}]
    for step in range(1, 21):
        row = {"step": step, "reward": 0.3 + step * 0.03, "kl": 0.01 * step, "policy_loss": 0.1 - step / 100}
        rows.append(row | {"eval_accuracy": 0.18 + step * 0.035} if step % 5 == 0 else row)
    answers = [
        {"question": "spell 'sun' backward", "right": "nus", "before": "sun", "after": "nus"},
        {"question": "spell 'cat' backward", "right": "tac", "before": "", "after": "tca"},
    ]
    basis = RunRecord(
        name="demo",
        directory=Path("/home/somebody/work/runs/demo"),
        config=CONFIG,
        metrics=rows,
        tables={"Answers to held-out problems": answers},
        totals=totals(spans),
        spans=spans,
        phases={"warm_up": 1.0, "rollout": 9.5, "actor_update": 8.0},
        tree="runtime local",
        graph=graph(),
        environment={"python": "3.13.1", "cpus": "2"},
        started=STARTED,
        seconds=20.0,
        memory=(memory(),),
    )
    return attrs.evolve(basis, **changes)


class Page:
    """A report page, written and parsed again; malformed pages raise."""

    def __init__(self, folder: Path, of: RunRecord, error: str | None = None) -> None:
        self.path = report.write(folder, of, error=error)
        self.text = self.path.read_text(encoding="utf-8")
        self.root = ElementTree.fromstring(self.text)

    def section(self, name: str) -> ElementTree.Element:
        found = self.root.find(f".//section[@id='{name}']")
        assert found is not None, name
        return found

    def head(self, path: str) -> list[str]:
        """Return the texts of the elements at a path of the page's header, with single spaces."""
        return [" ".join("".join(each.itertext()).split()) for each in self.root.iterfind(f"./body/header/{path}")]

    def words(self, name: str) -> str:
        """Return a section's text, with single spaces."""
        return " ".join("".join(self.section(name).itertext()).split())

    def rows(self, name: str, table: int = 0) -> Iterator[list[str]]:
        """Yield the rows of a section's table, as texts of cells."""
        for row in self.section(name).findall(".//table")[table].findall("./tbody/tr"):
            yield ["".join(cell.itertext()).replace("\xa0", " ").strip() for cell in row]

    def find(self, section: str, tag: str, **attributes: str) -> list[ElementTree.Element]:
        return [each for each in self.section(section).iter(tag) if has(each, attributes)]


def has(element: ElementTree.Element, attributes: Mapping[str, str]) -> bool:
    """Return whether an element's attributes contain these words; class_ stands for class."""
    return all(value in element.get(name.rstrip("_"), "").split() for name, value in attributes.items())

"""What all runs of the same code have come to, in a file that each run continues."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
from tests.chaos.programs import KINDS

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "executors", "tests/chaos")
"""What makes a difference to the numbers: with another text in there they begin anew."""
BUT_FOR = ("core/colocate/testing/", "tests/chaos/test_")
"""What tests colocate in other ways doesn't."""
SUFFIXES = (".py",)
STEP = len(KINDS)
"""Seeds of one kind are so far apart."""


def digest(root: Path = ROOT) -> str:
    found = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = str(path.relative_to(root))
            if path.suffix in SUFFIXES and path.is_file() and not name.startswith(BUT_FOR):
                found.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() or "unknown"


@attrs.define(eq=False)
class Tally:
    """What one kind of fault has come to on one executor."""

    seeds: list[int] = attrs.field(factory=list)  # those played
    tried: int = 0  # faults that were done
    survived: int = 0  # those after which all was as the laws want it
    hangs: int = 0  # what outlived its bound by more than it may
    left: int = 0  # what was left behind
    wrong: int = 0  # results, errors and orders that the laws don't allow
    late: int = 0  # ends after more than the seconds that there are for it
    error_ms: list[float] = attrs.field(factory=list)  # from the fault to the first error that told it
    over_ms: list[float] = attrs.field(factory=list)  # what closes took beside their grace
    free_ms: list[float] = attrs.field(factory=list)  # from the end of a driver until nothing of it was left
    targets: dict[str, int] = attrs.field(factory=dict)  # faults by what they hit: moments, sockets
    turns: int = 0  # those of the faults tried that came where roles take turns

    def count(self, target: str) -> None:
        self.targets[target] = self.targets.get(target, 0) + 1


@attrs.define(eq=False)
class Ledger:
    """The file. All methods may be called from any thread."""

    path: Path | None = None
    code: str = attrs.field(factory=digest)
    commit: str = attrs.field(factory=commit)
    tallies: dict[str, dict[str, Tally]] = attrs.field(factory=dict)
    problems: list[dict[str, Any]] = attrs.field(factory=list)
    lock: threading.RLock = attrs.field(factory=threading.RLock)

    @classmethod
    def open(cls, path: Path | None) -> Ledger:
        """Continue a file, if it is of this very code."""
        ledger = cls(path)
        if path is None or not path.exists():
            return ledger
        data = json.loads(path.read_text())
        if data.get("code") == ledger.code:
            for executor, kinds in data["executors"].items():
                for kind, fields in kinds.items():
                    fields["seeds"] = list(spelled_out(fields["seeds"]))
                    ledger.tallies.setdefault(executor, {})[kind] = Tally(**fields)
            ledger.problems = data["problems"]
        return ledger

    def tally(self, executor: str, kind: str) -> Tally:
        with self.lock:
            return self.tallies.setdefault(executor, {}).setdefault(kind, Tally())

    def problem(self, executor: str, kind: str, seed: int, what: str, words: str) -> None:
        """Note what went wrong: `what` is hangs, left or wrong. Where the code lies on this machine isn't kept."""
        words = words.replace(f"{ROOT}/", "")[:4000]
        with self.lock:
            tally = self.tally(executor, kind)
            setattr(tally, what, getattr(tally, what) + 1)
            entry = {"executor": executor, "kind": kind, "seed": seed, "what": what, "words": words}
            self.problems.append(entry)

    def save(self) -> None:
        """Write the file; whole, or not at all."""
        if self.path is None:
            return
        with self.lock:
            executors = {
                name: {
                    kind: {**attrs.asdict(tally), "seeds": ranges(tally.seeds)} for kind, tally in sorted(kinds.items())
                }
                for name, kinds in sorted(self.tallies.items())
            }
            data = {"code": self.code, "commit": self.commit, "executors": executors, "problems": self.problems}
            new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            new.write_text(_text(data))
            new.replace(self.path)


def _text(data: dict[str, Any]) -> str:
    """JSON with a line for each kind of fault on each executor, so that a change can be read."""
    executors = ",\n".join(
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f"   {json.dumps(kind)}: {json.dumps(tally)}" for kind, tally in kinds.items())
        + "\n  }"
        for name, kinds in data["executors"].items()
    )
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(data[key])}" for key in ("code", "commit"))
    problems = ",\n".join(f"  {json.dumps(problem)}" for problem in data["problems"])
    return f'{{\n{head},\n "executors": {{\n{executors}\n }},\n "problems": [\n{problems}\n ]\n}}\n'


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in short, those of one step as a range: "0-45, 60"."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][-1] + STEP:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def spelled_out(text: str) -> Iterable[int]:
    """The reverse of `ranges`."""
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1, STEP)

"""The results of all runs of the same code, in a file that each run continues."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).parents[2]
# Folders that the numbers depend on: a change there restarts the counts. Other tests of colocate don't matter.
FOLDERS = ("core", "executors", "tests/chaos")
BUT_FOR = ("core/colocate/testing/", "tests/chaos/test_")


def digest() -> str:
    found = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(BUT_FOR):
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
    """The counts of one kind of fault on one executor."""

    last: int | None = None  # the last played seed, after all earlier seeds of the kind
    tried: int = 0  # injected faults
    survived: int = 0  # faults after which no law was broken
    hangs: int = 0  # operations that exceeded their bounds
    left: int = 0  # leftovers
    wrong: int = 0  # results, errors and orders that the laws don't allow
    late: int = 0  # drivers whose leftovers were freed too late
    error_ms: list[float] = attrs.field(factory=list)  # from the fault to the first error that reports it
    over_ms: list[float] = attrs.field(factory=list)  # the time of closes beyond their grace
    free_ms: list[float] = attrs.field(factory=list)  # from the end of a driver until nothing was left of it
    targets: dict[str, int] = attrs.field(factory=dict)  # faults by target: a moment or a socket

    def played(self, seed: int) -> None:
        self.last = seed if self.last is None else max(self.last, seed)

    def count(self, target: str) -> None:
        self.targets[target] = self.targets.get(target, 0) + 1


@attrs.define(eq=False)
class Ledger:
    """The file, or a part with counts of its own. All methods may be called from any thread."""

    path: Path | None = None
    part: str = ""
    code: str = attrs.field(factory=digest)
    commit: str = attrs.field(factory=commit)
    tallies: dict[str, dict[str, Tally]] = attrs.field(factory=dict)
    problems: list[dict[str, Any]] = attrs.field(factory=list)
    lock: threading.RLock = attrs.field(factory=threading.RLock)

    @classmethod
    def open(cls, path: Path, of_any_code: bool = False, part: str = "") -> Ledger:
        """Continue a file if it is of the same code; read any file with `of_any_code`."""
        ledger = cls(path, part)
        data = json.loads(path.read_text()) if path.exists() else {}
        data = data.get(part, {}) if part else data
        if data and (of_any_code or data["code"] == ledger.code):
            ledger.code, ledger.commit, ledger.problems = data["code"], data["commit"], data["problems"]
            for executor, kinds in data["executors"].items():
                for kind, fields in kinds.items():  # an older file may have more fields
                    known = {name: fields[name] for name in attrs.fields_dict(Tally) if name in fields}
                    ledger.tallies.setdefault(executor, {})[kind] = Tally(**known)
        return ledger

    def tally(self, executor: str, kind: str) -> Tally:
        with self.lock:
            return self.tallies.setdefault(executor, {}).setdefault(kind, Tally())

    def problem(self, executor: str, kind: str, seed: int, what: str, words: str) -> None:
        """Record and print a problem: `what` is hangs, left or wrong. Paths are stored below the root."""
        print(f"{executor} seed {seed} ({kind}): {what}: {words}")
        words = words.replace(f"{ROOT}/", "")[:4000]
        with self.lock:
            tally = self.tally(executor, kind)
            setattr(tally, what, getattr(tally, what) + 1)
            entry = {"executor": executor, "kind": kind, "seed": seed, "what": what, "words": words}
            self.problems.append(entry)

    def save(self) -> None:
        """Write the file atomically."""
        if self.path is None:
            return
        with self.lock:
            new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            data = json.loads(self.path.read_text()) if self.path.exists() else {}
            new.write_text(self._text(data) + "\n")
            new.replace(self.path)

    def _text(self, data: dict[str, Any]) -> str:
        """Return the text of the file with this ledger's data."""
        tallies = {
            name: {kind: attrs.asdict(each) for kind, each in kinds.items()} for name, kinds in self.tallies.items()
        }
        mine = {"code": self.code, "commit": self.commit, "executors": tallies, "problems": self.problems}
        return _shown({**data, self.part: mine} if self.part else {**data, **mine})


def _shown(data: dict[str, Any]) -> str:
    """Return JSON with a line for each kind of fault on each executor, for readable diffs."""
    executors = ",\n".join(
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f"   {json.dumps(kind)}: {json.dumps(kinds[kind])}" for kind in sorted(kinds))
        + "\n  }"
        for name, kinds in sorted(data.get("executors", {}).items())
    )
    fields = [f" {json.dumps(name)}: {json.dumps(data[name])}" for name in ("code", "commit") if name in data]
    fields.append(f' "executors": {{\n{executors}\n }}')
    problems = ",\n".join(f"  {json.dumps(problem)}" for problem in data.get("problems", []))
    fields.append(f' "problems": [\n{problems}\n ]')
    known = ("code", "commit", "executors", "problems")
    fields += [f" {json.dumps(name)}: {_shown(part)}" for name, part in data.items() if name not in known]
    return "{\n" + ",\n".join(fields) + "\n}"

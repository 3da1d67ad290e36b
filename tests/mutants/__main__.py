"""Run each mutant's test with the mutant in a copy of the tree: `python -m tests.mutants [NAME …]`.

The copy comes first on the path of all processes. The mutated module records which processes import it; a module of
workers must be imported by a worker. A test has to pass in the copy, and to fail there with the mutant. A test that
never ends has found its mutant, too.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "executors", "plugins", "tests")
AT_ONCE = 2
DEADLINE_S = 120.0  # longer than any wait in a test, and shorter than a test's limit
# Metadata of an installed distribution: for core, a folder with these isn't the user's own project.
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"
WITNESS = """
from pathlib import Path as _Path
_Path({folder!r}, str(__import__("os").getpid())).write_bytes(_Path("/proc/self/cmdline").read_bytes())
"""


@attrs.frozen
class Run:
    """A test's result: pytest's exit code, or None after a timeout, and the processes with the mutant (`seen`)."""

    code: int | None
    words: str
    seconds: float
    seen: Sequence[str]


class Tree:
    """A copy of the folders that tests need."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tree"
        self._seen = folder / "seen"
        self._folder.mkdir(parents=True)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self._folder / name)
            info = self._folder / name / f"copy_of_{name}-0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(METADATA.format(name=f"copy_of_{name}"))
        shutil.copy(ROOT / "pyproject.toml", self._folder)

    def run(self, test: str, mutant: Mutant | None = None) -> Run:
        """Run a test in the copy, with or without a mutant."""
        shutil.rmtree(self._seen, ignore_errors=True)
        self._seen.mkdir()
        if mutant is None:
            return self._run(test)
        file = self._folder / mutant.file
        text = file.read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, mutant.name
        file.write_text(text.replace(mutant.old, mutant.new) + WITNESS.format(folder=str(self._seen)))
        try:
            return self._run(test)
        finally:
            file.write_text(text)

    def _run(self, test: str) -> Run:
        command = [sys.executable, "-m", "pytest", "-qxrfE", "--color=no", "-p", "no:cacheprovider", test]
        path = os.pathsep.join(str(self._folder / name) for name in FOLDERS[:-1])
        began, code = time.monotonic(), None
        with subprocess.Popen(
            command,
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, _ = process.communicate(timeout=DEADLINE_S)
                code = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # workers end with it
                out, _ = process.communicate()
        told = [line for line in out.splitlines() if re.match(r"E  +(\S*(Error|Law|Failed): |assert ).", line)]
        words = (told or out.strip().splitlines() or [""])[-1].removeprefix("E").strip()
        if code == 0 and "1 passed" not in out:
            code = -1
        return Run(code, words, time.monotonic() - began, [each.read_text() for each in self._seen.iterdir()])


def verdict(mutant: Mutant, run: Run) -> str:
    """Return the verdict on a mutant, which begins with "found" if the test has found the mutant."""
    if run.code not in (0, 1, None):
        return f"NOT RUN: {run.words}"
    if not run.seen:
        return "NOT IMPORTED"
    workers = ("colocate.worker", "tests.forked")  # a template may be a fork of tests.forked
    if mutant.is_of_workers and not any(name in each for each in run.seen for name in workers):
        return "NOT IMPORTED by a worker"
    if run.code is None:
        return "found: it goes on for ever"
    return f"found: {run.words}" if run.code else "NOT FOUND"


def tried(trees: queue.SimpleQueue[Tree], test: str, mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, str, float]]:
    """Yield the mutants of a test, each with the verdict and the seconds of its run."""
    tree = trees.get()
    try:
        whole = tree.run(test)
        for mutant in mutants:
            if whole.code != 0:
                yield mutant, f"NOT RUN: without it, too: {whole.words}", whole.seconds
                continue
            run = tree.run(test, mutant)
            yield mutant, verdict(mutant, run), run.seconds
    finally:
        trees.put(tree)


def main() -> int:
    """Try the named mutants, or all, and print a table; return 1 unless all were found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a mutant's name, or an area: some only")
    names = parser.parse_args().names
    chosen = {
        each: area for area, some in MUTANTS.items() for each in some if not names or {area, each.name} & {*names}
    }
    found = 0

    def all_of(test: str) -> None:
        nonlocal found
        for mutant, said, seconds in tried(trees, test, [each for each in chosen if each.test == test]):
            found += said.startswith("found")
            print(f"{chosen[mutant]:10} {mutant.name:26} {seconds:4.0f} s  {said[:160]}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(AT_ONCE):
            trees.put(Tree(Path(folder, str(number))))
        list(pool.map(all_of, dict.fromkeys(each.test for each in chosen)))
    print(f"{found} of {len(chosen)} found")
    return 0 if chosen and found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.mutants [NAME …]`: each mutant in a copy of the tree, and the test that is to find it.

The copy comes first on the path of all processes. Whether it was the mutated module that they have imported the module
itself says; workers have to have it, too, if it is one of theirs. A test has to pass in the copy before it is to fail
there. One that goes on for ever has found its mutant, too.
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
DEADLINE_S = 120.0  # more than what a test waits for something, and less than what it may take
# What the metadata of an installed distribution are to core: the folder that has some is no project's own.
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"
WITNESS = """
from pathlib import Path as _Path
_Path({folder!r}, str(__import__("os").getpid())).write_bytes(_Path("/proc/self/cmdline").read_bytes())
"""


@attrs.frozen
class Run:
    """What has become of a test: pytest's code, None when it was ended, and who has imported the mutant (`seen`)."""

    code: int | None
    words: str
    seconds: float
    seen: Sequence[str]


class Tree:
    """A copy of what tests need."""

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
        """Run a test, as the tree is or with a mutant in it."""
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
    """What a run says of a mutant: it begins with "found", or not."""
    if run.code not in (0, 1, None):
        return f"NOT RUN: {run.words}"
    if not run.seen:
        return "NOT IMPORTED"
    workers = ("colocate.worker", "tests.forked")  # of the latter a template may be a fork
    if mutant.is_of_workers and not any(name in each for each in run.seen for name in workers):
        return "NOT IMPORTED by a worker"
    if run.code is None:
        return "found: it goes on for ever"
    return f"found: {run.words}" if run.code else "NOT FOUND"


def tried(trees: queue.SimpleQueue[Tree], test: str, mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, str, float]]:
    """Yield the verdicts on the mutants that a test is to find, with how long each has taken."""
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
    """Try those that are named, or all; print a table; 1 when not all were found."""
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

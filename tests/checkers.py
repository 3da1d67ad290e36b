"""Run the type checkers in parallel: `python -m tests.checkers`.

After a run without complaints a checker runs again only when an input has changed: a file, the settings, an installed
package. Such a run leaves a digest of all inputs in `.venv/checked`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[1]
_CORE = ("colocate", "colocate_run", "colocate_report")
_AROUND = ("colocate_local", "colocate_ray", "colocate_dask", "colocate_ppo", "colocate_rollout", "colocate_verl")
_PACKAGES = (*_CORE, *_AROUND, "tests.chaos", "tests.suite")
_SOURCES = ("core", "executors", "plugins")


@attrs.frozen
class Checker:
    """A type checker.

    Attributes:
        name: The module to run.
        arguments: The command-line arguments of the module.
        folders: The folders of the Python files that the checker reads.
    """

    name: str
    arguments: Sequence[str]
    folders: Sequence[str]


CHECKERS = (
    Checker("mypy", [argument for name in _PACKAGES for argument in ("-p", name)], [*_SOURCES, "tests"]),
    Checker("pyright", [], _SOURCES),
)


def read_by(checker: Checker, root: Path) -> str:
    """Return a digest of a checker's inputs and command."""
    files = [path for folder in checker.folders for path in (root / folder).rglob("*.py*") if path.suffix != ".pyc"]
    digest = hashlib.sha256(repr((checker, sys.version, sorted(_installed()))).encode())
    for path in [*sorted(files), root / "pyproject.toml"]:
        content = path.read_bytes()
        digest.update(f"\n{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _installed() -> Iterator[str]:
    for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
        yield path.name


def check(checker: Checker, root: Path, content: Path) -> tuple[bool, str]:
    """Run a checker if an input has changed; return success and the output."""
    digest, stamp = read_by(checker, root), content / checker.name
    if stamp.exists() and stamp.read_text() == digest:
        return True, "nothing has changed since it was content\n"
    done = subprocess.run(
        [sys.executable, "-m", checker.name, *checker.arguments],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == 0 and read_by(checker, root) == digest:  # no file has changed meanwhile
        content.mkdir(parents=True, exist_ok=True)
        stamp.write_text(digest)
    return done.returncode == 0, done.stdout


def main() -> int:
    """Run all checkers; return 1 if one complains."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda each: check(each, ROOT, Path(sys.prefix) / "checked"), CHECKERS))
    for checker, (_, told) in zip(CHECKERS, found, strict=True):
        print(f"{checker.name}: {told}", end="")
    return 0 if all(content for content, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.wheels VERSION`: which pins of constraints.txt pip finds no wheel of for a version of Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.gpu.wheels import PURE_SOURCES, SOURCES

PINS = Path(__file__).resolve().parents[1] / "constraints.txt"
_NONE = re.compile(r"No matching distribution found for (\S+)")


def main() -> None:
    """Say so."""
    version = sys.argv[1]
    pins = PINS.read_text().split()
    sources = (*PURE_SOURCES, *SOURCES)
    wheels = [pin for pin in pins if pin.partition("==")[0] not in sources]
    lacking = without_wheel(wheels, version)
    print(f"Python {version}: {len(wheels) - len(lacking)} of {len(pins)} pins of {PINS.name} have a wheel")
    print(f"  made from source on each version: {', '.join(sources)}")
    print(f"  without a wheel for this one: {', '.join(lacking) or 'none'}")


def without_wheel(pins: list[str], version: str) -> list[str]:
    """Return those of some pins that have no wheel: pip names the first, and so is asked until it finds all others."""
    options = ["--quiet", "--dry-run", "--no-deps", "--only-binary=:all:", "--python-version", version, "--target", "."]
    found: list[str] = []
    while left := [pin for pin in pins if pin not in found]:
        asked = subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, *left], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0:
            break
        named = _NONE.search(asked.stderr)
        if named is None or named[1] not in left:
            sys.exit(asked.stderr)
        found.append(named[1])
    return found


if __name__ == "__main__":
    main()

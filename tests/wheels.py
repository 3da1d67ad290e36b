"""List the pins of constraints.txt without a wheel for a version of Python: `python -m tests.wheels VERSION`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.gpu.wheels import PURE_SOURCES, SOURCES

PINS = Path(__file__).resolve().parents[1] / "constraints.txt"
_NONE = re.compile(r"No matching distribution found for (\S+)")


def main() -> None:
    """Print the pins without a wheel for the version on the command line."""
    version = sys.argv[1]
    pins = PINS.read_text().split()
    sources = (*PURE_SOURCES, *SOURCES)
    wheels = [pin for pin in pins if pin.partition("==")[0] not in sources]
    lacking = without_wheel(wheels, version)
    print(f"Python {version}: {len(wheels) - len(lacking)} of {len(pins)} pins of {PINS.name} have a wheel")
    print(f"  made from source on each version: {', '.join(sources)}")
    print(f"  without a wheel for this one: {', '.join(lacking) or 'none'}")


def without_wheel(pins: list[str], version: str) -> list[str]:
    """Return the pins without a wheel: pip names only the first one, and runs again until no more are missing."""
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

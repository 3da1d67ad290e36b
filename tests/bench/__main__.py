"""`python -m tests.bench [--json FILE] [PART ...]`: measure, and print one table."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from tests.bench.rows import Row, show

PARTS = (
    "calls",
    "before",
    "residents",
    "scale",
    "slots",
    "memory",
    "sleep",
    "budget",
    "ppo",
    "recordings",
    "engines",
    "fast_paths",
    "starts",
    "chain",
    "verl_calls",
    "verl_trainers",
    "faults",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="The project's numbers in one table.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}: the parts are {', '.join(PARTS)}")
    rows: list[Row] = []
    console = Console()
    with console.status("measuring") as status:
        for name in options.parts or PARTS:
            status.update(f"measuring: {name}")
            # Imported only here: the imports of a part (torch, say) would disturb the measurements of earlier parts.
            rows += importlib.import_module(f"tests.bench.{name}").rows()
    show(rows, console)
    if options.json is not None:
        options.json.write_text(json.dumps([row.data() for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()

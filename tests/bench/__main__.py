"""`python -m tests.bench [--json FILE] [PART ...]`: measure, and print one table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from tests.bench import calls, memory, ppo, residents, scale
from tests.bench.rows import Row, show

PARTS = {part.__name__.rpartition(".")[2]: part.rows for part in (calls, residents, scale, memory, ppo)}


def main() -> None:
    """Measure the parts that were asked for, and print them."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="The project's numbers in one table.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}: the parts are {', '.join(PARTS)}")
    rows: list[Row] = []
    console = Console()
    with console.status("measuring") as status:
        for name in options.parts or PARTS:
            status.update(f"measuring: {name}")
            rows += PARTS[name]()
    show(rows, console)
    if options.json is not None:
        options.json.write_text(json.dumps([row.data() for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()

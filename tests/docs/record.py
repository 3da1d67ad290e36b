"""Write the real outputs into pages: `python -m tests.docs.record docs/first-group.md …`. Read the pages afterwards.

With --fresh, replace correct outputs, too, for new ages, pids and line numbers; never outputs with `...`.
"""

from __future__ import annotations

import platform
import re
import sys
import tempfile
from pathlib import Path

from tests.docs import pages
from tests.docs.blocks import PAGES
from tests.docs.outputs import NODE, matches
from tests.forked import Forks


def main(names: list[str], fresh: bool) -> None:
    forks = Forks()
    for page in [page for page in PAGES if not names or page.name in {Path(name).name for name in names}]:
        with tempfile.TemporaryDirectory() as folder:
            results = pages.run(page, Path(folder) / "page", forks)
        lines = page.read_text(encoding="utf-8").splitlines()
        changed = 0
        for step, output in reversed(results):
            shown = step.shown or ""
            if matches(shown, output) and not (fresh and shown and "..." not in shown):
                continue
            if step.do == "python" and step.shown is None:
                sys.exit(f"{page}, line {step.line}: add a text block, for it prints\n{output}")
            lines[slice(*step.at)] = _tidy(output).splitlines()
            changed += 1
        page.write_text("\n".join([*lines, ""]), encoding="utf-8")
        sys.stdout.write(f"{page}: {changed} outputs written\n")
    forks.close()


def _tidy(output: str) -> str:
    """Return an output for a page, without this machine's name and paths."""
    output = re.sub(r'(  File "/[^\n]*\n(    [^\n]*\n)*)+', "  ...\n", output)  # frames with absolute paths
    output = re.sub(r" +$", "", output, flags=re.MULTILINE)
    return re.sub(rf"\b{re.escape(platform.node())}\b", NODE, output).strip("\n")


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--fresh"], "--fresh" in sys.argv)

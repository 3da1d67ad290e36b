"""A driver that times the start of its workers: `python starting.py EXECUTOR light|memory`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import colocate
from colocate import Role, method

_WORKERS = 2


def main() -> None:
    executor, what = sys.argv[1:]
    options: dict[str, Any] = {"processes": True} if executor == "local" else {"cpus": 8}
    if what == "light":

        class Probe(Role):
            """A role without state."""

            @method
            def noop(self) -> None:
                """Do nothing."""

    else:
        import torch

        class Probe(Role):  # type: ignore[no-redef]
            """A role with one layer."""

            def __init__(self) -> None:
                self.layer = torch.nn.Linear(8, 8)

            @method
            def noop(self) -> None:
                """Do nothing."""

    roles = {"probe": colocate.role(Probe)}
    steps: dict[str, float] = {}
    began = time.perf_counter()
    with colocate.connect(executor, **options) as runtime:
        with runtime.reserve(_WORKERS) as pool:
            first = pool.spawn(roles)
            steps["first of all"] = time.perf_counter() - began
            first.close()
        with runtime.reserve(_WORKERS) as pool:
            began = time.perf_counter()
            group = pool.spawn(roles)
            steps["second"] = time.perf_counter() - began
            group.close()
            if what == "memory":
                with pool[0:1].spawn(roles):
                    before = _summed()
                    with pool[1:2].spawn(roles):
                        steps["one more"] = _summed() - before
    print(json.dumps(steps))


def _summed() -> float:
    """Return the memory of this process and all below it in MiB, with shared pages counted by their share."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            below.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:  # the process has ended
            continue
    found = [os.getpid()]
    for pid in found:  # the list grows meanwhile
        found += below.get(pid, [])
    lines = [line for pid in found for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()

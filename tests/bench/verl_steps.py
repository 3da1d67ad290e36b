"""`python -m colocate_verl.demo`, with the CPU seconds of all processes in the metrics of each step: `cpu_s`.

The wall time of a step depends mostly on other load on the machine; its CPU time doesn't.
"""

from __future__ import annotations

import os
from typing import Any

import psutil

from colocate_verl.demo import ENVIRONMENT

os.environ.update(ENVIRONMENT)
os.environ.pop("COLOCATE_VERL", None)

import verl.utils.tracking

from colocate_verl.demo.__main__ import main

_so_far: dict[int, float] = {}
_log = verl.utils.tracking.Tracking.log


def _spent() -> float:
    """Return the CPU seconds of this process and all below since the last call."""
    this = psutil.Process()
    spent = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent += times.user + times.system - _so_far.get(process.pid, 0.0)
        _so_far[process.pid] = times.user + times.system
    return spent


def _log_spent(self: Any, data: dict[str, Any], step: int, **options: Any) -> None:
    _log(self, data={**data, "cpu_s": _spent()}, step=step, **options)


verl.utils.tracking.Tracking.log = _log_spent
if __name__ == "__main__":
    main()

"""How many threads numerical libraries use, in a worker that found them imported: their variables come too late."""

from __future__ import annotations

import ctypes
import os
import sys

_OPENBLAS = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")]


def raise_thread_counts() -> None:
    """Have torch and OpenBLAS use as many as the environment says, or else as they would by themselves."""
    if sys.modules.keys().isdisjoint({"numpy", "torch"}):  # one of them has loaded OpenBLAS, or nothing has
        return
    count = _first_number("OMP_NUM_THREADS")
    if count and (torch := sys.modules.get("torch")) is not None:  # else it counted the processors when it was imported
        torch.set_num_threads(count)
    count = _first_number("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    for path in _loaded("openblas"):
        library = ctypes.CDLL(path)
        for name in _OPENBLAS:
            if (setter := getattr(library, name, None)) is not None:
                setter(count or len(os.sched_getaffinity(0)))


def _first_number(*names: str) -> int:
    """What the first of some variables says that says a number; 0 when none does."""
    for name in names:
        digits = os.environ.get(name, "").split(",")[0].strip()
        if digits.isdigit() and int(digits):
            return int(digits)
    return 0


def _loaded(word: str) -> set[str]:
    """The libraries of this process with a word in their name."""
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/" in line}
    return {path for path in paths if word in os.path.basename(path)}

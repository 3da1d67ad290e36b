"""Write the output of each worker of a run to a file, `logs/<group>-<slot>.txt` in the run's folder.

The output of a worker's process reaches the driver on every executor. Prints of roles on threads of the driver are
assigned by the role that runs. A separate thread writes the files, so that a slow disk delays no other work.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from colocate.driver import JobThread, report_exception

if TYPE_CHECKING:
    from colocate.driver import Context
    from colocate.executor import Boot

FOLDER = "logs"
MOST_BYTES = 16 << 20
"""Size of a log file, in bytes, at which the file is renamed with a number and a new file begins."""
OLDER = 3
"""Number of older files kept per worker."""
EQUAL_WITHIN_S = 5.0
"""Seconds within which equal lines of several ranks are shown only once."""
_WAITING_CHARS = 16 << 20
_ENDS_WITHIN_S = 5.0
_CLOCK = re.compile(r"\d\d:\d\d:\d\d[.,\d]*")  # Lines that differ only in a time of day count as equal.
_FILE = re.compile(r"(?P<group>.+)-(?P<slot>\d+)(?:\.(?P<older>\d+))?\.txt")


class LogFile(NamedTuple):
    """A worker's log file. `older` is 0 for the current file, 1 for the file before it, and so on."""

    group: str
    slot: int
    older: int
    path: Path


def list_logs(folder: Path) -> list[LogFile]:
    """Return the logs of a run's workers, older parts first.

    Args:
        folder: The run's folder.
    """
    files = []
    for path in (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ():
        if (match := _FILE.fullmatch(path.name)) is not None:
            files.append(LogFile(match["group"], int(match["slot"]), int(match["older"] or 0), path))
    return sorted(files, key=lambda each: (each.group, each.slot, -each.older))


class EqualLines:
    """A filter that shows only one of the equal lines that several ranks print.

    A line that a rank prints n times is shown n times, however many ranks print it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Maps group, role and text to the time of the first such line, and to the number of such lines by slot.
        self._recent: dict[tuple[str, str, str], tuple[float, Counter[int]]] = {}

    def is_repeated(self, group: str, slot: int, label: str | None, text: str) -> bool:
        """Record a line; return whether an equal line of another rank was shown instead."""
        key = group, (label or "").rpartition(" ")[0], _CLOCK.sub("", text)
        now = time.monotonic()
        with self._lock:
            while self._recent and next(iter(self._recent.values()))[0] < now - EQUAL_WITHIN_S:
                del self._recent[next(iter(self._recent))]
            _, counts = self._recent.setdefault(key, (now, Counter()))
            most = max(counts.values(), default=0)
            counts[slot] += 1
            return counts[slot] <= most


class WorkerLogs:
    """A writer of the workers' output to log files.

    Attributes:
        fault: The reason why lines are missing; None if all are written.
    """

    def __init__(self, folder: Path) -> None:
        """Create a writer for a run's folder."""
        self.fault: str | None = None
        self._folder = folder / FOLDER
        self._jobs = JobThread("colocate-logs", lambda error: report_exception())
        self._lock = threading.Lock()  # Protects the queue of lines. No file is written under this lock.
        self._lines: deque[tuple[Path, str]] = deque()
        self._waiting = self._dropped = 0
        self._is_closed = False
        self._last_generation: dict[Path, int] = {}  # The generation of the worker that wrote last to each file.
        self._unended: dict[Path, dict[str, str]] = defaultdict(dict)  # Unfinished lines, by file and by role and rank.
        self._equal = EqualLines()

    def on_line(self, boot: Boot, label: str | None, text: str) -> bool:
        """Queue a line of a worker's process, without blocking.

        A line that ends in a carriage return is replaced by the next line.

        Returns:
            Whether an equal line of another rank was shown already.
        """
        path = self._path_for(boot.group, boot.slot)
        if self._last_generation.get(path) != boot.generation:
            self._last_generation[path] = boot.generation
            again = f", after {boot.generation} restarts" if boot.generation else ""
            self._enqueue(path, f"-- {boot.worker} on node {boot.node}{again}")
        if text.endswith("\r"):
            self._unended[path][""] = _format_line(label, text[:-1])
        else:
            self._unended[path].pop("", None)
            self._enqueue(path, _format_line(label, text))
        return self._equal.is_repeated(boot.group, boot.slot, label, text)

    def on_print(self, ctx: Context, text: str) -> None:
        """Queue the output of a role on a thread of this process, without blocking."""
        path, label = self._path_for(ctx.group, ctx.slot), f"{ctx.role or 'run'} {ctx.rank}"
        *lines, rest = (self._unended[path].pop(label, "") + text).split("\n")
        for line in lines:
            self._enqueue(path, _format_line(label, line.rpartition("\r")[2] or line.strip("\r")))
        if rest:
            self._unended[path][label] = rest

    def close(self) -> None:
        """Write the remaining lines, waiting at most `_ENDS_WITHIN_S` seconds for the disk."""
        for path, lines in self._unended.items():
            for label, text in lines.items():
                self._enqueue(path, _format_line(label, text) if label else text)
        self._unended.clear()
        with self._lock:
            self._is_closed = True
        self._jobs.close(_ENDS_WITHIN_S)
        if self._lines:
            self.fault = self.fault or f"the disk didn't take the last lines within {_ENDS_WITHIN_S:g} s"

    def _path_for(self, group: str, slot: int) -> Path:
        return self._folder / f"{group}-{slot}.txt"

    def _enqueue(self, path: Path, text: str) -> None:
        now = time.time()
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03} {text}\n"
        with self._lock:
            if self._is_closed:
                return
            if self._waiting > _WAITING_CHARS:
                self._dropped += 1
                return
            if self._dropped:
                self._lines.append((path, f"({self._dropped} lines of workers are missing: the disk was too slow)\n"))
                self._dropped = 0
            idle = not self._lines
            self._lines.append((path, line))
            self._waiting += len(line)
        if idle:
            with suppress(RuntimeError):  # If no new thread can start, the next line tries again.
                self._jobs.call_soon(self._write_lines)

    # -- on the thread

    def _write_lines(self) -> None:
        while True:
            with self._lock:
                lines, self._lines = self._lines, deque()
                self._waiting = 0
            if not lines:
                return
            by_file: dict[Path, list[str]] = {}
            for path, line in lines:
                by_file.setdefault(path, []).append(line)
            for path, parts in by_file.items():
                try:
                    self._append(path, "".join(parts).encode("utf-8", "backslashreplace"))
                except OSError as error:  # A full disk ends the logs, but not the run.
                    self.fault = self.fault or str(error)

    @staticmethod
    def _append(path: Path, data: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(data)
            size = file.tell()
        if size > MOST_BYTES:
            for number in range(OLDER - 1, -1, -1):
                part = path.with_suffix(f".{number}.txt") if number else path
                with suppress(FileNotFoundError):
                    part.rename(path.with_suffix(f".{number + 1}.txt"))


def _format_line(label: str | None, text: str) -> str:
    return text if label is None else f"[{label}] {text}"

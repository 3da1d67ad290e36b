"""`colocate logs`: print the output of a run's workers, and follow new output."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from colocate.errors import ConfigError
from colocate.texts import join_words
from colocate_report.jobs import list_jobs, matches_job
from colocate_run.cli.output import report_errors
from colocate_run.lock import LOCK, WATCHED_S
from colocate_run.logs import FOLDER, LogFile, list_logs

_LOOKS_S = 0.2
_TIME = len("2026-01-31 23:59:59.999")
_LABEL = re.compile(r"[\d:. -]{23} \[(\S+) (\d+)[\] ]")


@attrs.frozen
class LogSelection:
    """A filter for log lines. An attribute that is None accepts all lines.

    Attributes:
        group: The group.
        role: The role that printed the line.
        rank: The role's rank if `role` is set, otherwise the worker's slot.
    """

    group: str | None
    role: str | None
    rank: int | None

    def may_match(self, file: LogFile) -> bool:
        """Return whether a log file may have matching lines."""
        return self.group in (None, file.group) and (self.role is not None or self.rank in (None, file.slot))

    def matches(self, line: str) -> bool:
        """Return whether a line matches, in a file for which `may_match` is true."""
        if self.role is None:
            return True
        match = _LABEL.match(line)
        return match is not None and match[1] == self.role and self.rank in (None, int(match[2]))


@report_errors
def show_logs(run: Path, wanted: LogSelection, *, lines: int, follow: bool) -> int:
    """Print the logs of a run's workers.

    Args:
        run: The run's folder, or its name, or its driver's process.
        wanted: The filter.
        lines: Number of last lines; 0 for all.
        follow: Whether to follow new lines until the run ends.
    """
    run = _find_folder(run)
    files = list_logs(run)
    if not files and not (follow and _is_running(run)):
        why = "no worker has printed anything, or it isn't a run's" if run.is_dir() else "there is no such folder"
        raise ConfigError(f"{run} has no folder {FOLDER}: {why}")
    chosen = [file for file in files if wanted.may_match(file)]
    if files and not chosen and not follow:
        workers = join_words(
            [f"{group}/{slot}" for group, slot in dict.fromkeys((file.group, file.slot) for file in files)]
        )
        raise ConfigError(f"{run} has no such worker; there are {workers}")
    with contextlib.ExitStack() as stack:
        parts = {file: stack.enter_context(_Reader(file.path, _line_prefix(file, wanted))) for file in chosen}
        selected = [line for line in _merge_lines([*parts.values()]) if wanted.matches(line[1])]
        if wanted.role is not None and not (selected or follow):
            rank = "" if wanted.rank is None else f", rank {wanted.rank},"
            raise ConfigError(f"{run} has no line that role {wanted.role!r}{rank} has printed")
        for lead, line in selected[-lines:] if lines else selected:
            sys.stdout.write(f"{lead}{line}")
        sys.stdout.flush()
        if follow:
            _follow_logs(run, wanted, {file.path: part for file, part in parts.items() if not file.older}, stack)
    return 0


def _find_folder(run: Path) -> Path:
    """Find a run's folder by the path or name of the folder, or by the name or process of the job."""
    for folder in run, Path("runs", run):
        if folder.is_dir():
            return folder
    text = str(run)
    named = [job for job in list_jobs() if text in (job.id, str(job.pid)) or matches_job(job.name, text)]
    return Path(f"/proc/{named[0].pid}/cwd/runs/{named[0].name}").resolve() if len(named) == 1 else run


def _line_prefix(file: LogFile, wanted: LogSelection) -> str:
    is_one = wanted.group is not None and wanted.role is None and wanted.rank is not None
    return "" if is_one else f"[{file.group}/{file.slot}] "


def _follow_logs(run: Path, wanted: LogSelection, readers: dict[Path, _Reader], stack: contextlib.ExitStack) -> None:
    while True:
        ends = not _is_running(run)  # Check this before reading, so that the last lines are printed.
        for file in list_logs(run):
            if wanted.may_match(file) and not file.older and file.path not in readers:
                readers[file.path] = stack.enter_context(_Reader(file.path, _line_prefix(file, wanted)))
        for lead, line in _merge_lines([*readers.values()]):
            if wanted.matches(line):
                sys.stdout.write(f"{lead}{line}")
        sys.stdout.flush()
        if ends:
            return
        time.sleep(_LOOKS_S)


def _is_running(run: Path) -> bool:
    """Return whether a run's driver is still alive, as far as this machine can know."""
    if not any((run / name).exists() for name in ("report.html", "error.txt")):
        return True  # A script's run has no lock, so assume that the driver is alive.
    try:
        with (run / LOCK).open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < WATCHED_S:
                return True
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class _Reader:
    """A reader of a log file's complete lines, also after a rotation."""

    def __init__(self, path: Path, lead: str) -> None:
        self.path, self.lead = path, lead
        self._file = path.open("rb")
        self._partial_line = b""

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_lines(self) -> Iterator[str]:
        """Yield the lines that were added since the last call."""
        while True:
            data = self._partial_line + self._file.read()
            *whole, self._partial_line = data.split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace") + "\n"
            try:
                now = os.stat(self.path)
            except FileNotFoundError:
                return
            if os.path.samestat(now, os.fstat(self._file.fileno())):
                return
            self._file.close()
            self._file = self.path.open("rb")


def _merge_lines(readers: Sequence[_Reader]) -> Iterator[tuple[str, str]]:
    """Merge the lines of several files by time; yield pairs of label and line."""

    def lines(number: int, reader: _Reader) -> Iterator[tuple[str, int, str, str]]:
        last = ""
        for line in reader.read_lines():
            last = max(last, line[:_TIME])  # Keep a worker's lines in order even if the clock jumps back.
            yield last, number, reader.lead, line

    for _, _, lead, line in heapq.merge(
        *(lines(number, source) for number, source in enumerate(readers)), key=lambda x: x[:2]
    ):
        yield lead, line

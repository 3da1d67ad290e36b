"""Labels the output of role code with role and rank, so that the driver can name the source of each line."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections import deque
from collections.abc import Mapping

from colocate._role import context

# These characters enclose "ROLE RANK" before a line. Output of C code, roles' threads and children has no label.
_START, _END = "\x1e", "\x1f"
TAIL_LINES = 40
"""Number of last lines shown with a worker's death: room for the Python stack that a crash in C leaves."""


class LabelledStream(io.TextIOWrapper):
    """Text stream that begins each line with the label of the running role."""

    _at_start = True

    def write(self, text: str) -> int:
        """Write text, and return the number of characters."""
        running = context.current()
        if running is not None and text:
            label = f"{_START}{running.role or 'run'} {running.rank}{_END}"
            ended = text.endswith("\n")
            labelled = text.removesuffix("\n").replace("\n", f"\n{label}").replace("\r", f"\r{label}")
            labelled += "\n" if ended else ""
            super().write(label + labelled if self._at_start else labelled)
        else:
            super().write(text)
        if text:
            self._at_start = text.endswith("\n")
        return len(text)


def label_output() -> None:
    """Label the lines of this process's `sys.stdout` and `sys.stderr`.

    Each line is written at once, because a crash would lose buffered lines.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        labelled = LabelledStream(
            stream.detach(), encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True
        )
        setattr(sys, name, labelled)
        setattr(sys, f"__{name}__", labelled)


def print_for(label: str, line: str, group: str | None) -> None:
    """Print a line of a process that a role has started.

    Args:
        label: Role, rank, and the process's name.
        line: The line.
        group: The group if this process is the driver; None in a worker process.
    """
    lead = f"{_START}{label}{_END}" if group is None else f"[{group}/{label}] "
    with contextlib.suppress(OSError, ValueError):  # Nobody reads stderr, or stderr is closed.
        sys.stderr.write(f"{lead}{line}\n")


def get_log_levels() -> dict[str, int]:
    """Return the levels set on this process's loggers, the root's first; empty if the root logger has no handler."""
    root = logging.getLogger()
    if not root.handlers:
        return {}
    named = logging.Logger.manager.loggerDict.items()
    return {"": root.level} | {
        name: logger.level for name, logger in named if isinstance(logger, logging.Logger) and logger.level
    }


def apply_log_levels(levels: Mapping[str, int]) -> None:
    """Apply the driver's log levels to this process's loggers, until modules or roles set other levels or handlers."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    if levels and logging.lastResort is not None:  # Python's last-resort handler shows only warnings by default.
        logging.lastResort.setLevel(logging.NOTSET)
        logging.lastResort.setFormatter(logging.Formatter(logging.BASIC_FORMAT))


def split_label(line: str) -> tuple[str | None, str]:
    """Split a worker's output line into label and text."""
    if line.startswith(_START):
        label, separator, text = line[1:].partition(_END)
        if separator:
            return label, text
    return None, line


def get_last_state(line: str) -> str:
    """Return the visible part of a line that carriage returns overwrite (a progress bar): the last non-empty state."""
    states = line.split("\r")
    return next((state for state in reversed(states) if split_label(state)[1].strip()), states[0])


def trim_overwritten(rest: bytes) -> bytes:
    """Return the last two states of an unfinished progress bar, because nothing may follow the last carriage return."""
    return b"\r".join(rest.split(b"\r")[-2:])


class Tail(deque[str]):
    """The last lines of a worker's output. Of a line that carriage returns overwrite, only the last state is stored."""

    def __init__(self) -> None:
        super().__init__(maxlen=TAIL_LINES)

    def append(self, line: str) -> None:
        """Append a line. It replaces the previous line if that ends with a carriage return."""
        if self and self[-1].endswith("\r"):
            self.pop()
        super().append(line)

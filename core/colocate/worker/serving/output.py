"""What role code prints, labelled with the role and its rank, so that the driver can say whose line it is."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections import deque
from collections.abc import Mapping

from colocate._role import context

# Around "ROLE RANK", before a line. Lines of other origin (C code, threads of roles, children) have none.
_START, _END = "\x1e", "\x1f"
TAIL_LINES = 40
"""Of what a worker has printed last, what its death tells: with all of the Python stack that a crash in C leaves."""


class LabelledStream(io.TextIOWrapper):
    """A text stream that begins each line with the label of the role that writes it."""

    _at_start = True

    def write(self, text: str) -> int:
        """Write text; returns its length, as any stream does."""
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
    """Label the lines of `sys.stdout` and `sys.stderr` of this process. Line by line, or a death would take some."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        labelled = LabelledStream(
            stream.detach(), encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True
        )
        setattr(sys, name, labelled)
        setattr(sys, f"__{name}__", labelled)


def say_for(label: str, line: str, group: str | None) -> None:
    """Print a line of a process that a role has started.

    Args:
        label: Role, rank, and what the process is called.
        line: The line.
        group: The group, where this process is the driver's; None in a worker's own.
    """
    lead = f"{_START}{label}{_END}" if group is None else f"[{group}/{label}] "
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        sys.stderr.write(f"{lead}{line}\n")


def log_levels() -> dict[str, int]:
    """The levels that this process's loggers were given, the root's first; none where no handler shows their logs."""
    root = logging.getLogger()
    if not root.handlers:
        return {}
    named = logging.Logger.manager.loggerDict.items()
    return {"": root.level} | {
        name: each.level for name, each in named if isinstance(each, logging.Logger) and each.level
    }


def show_logs(levels: Mapping[str, int]) -> None:
    """Show what the driver would: its levels hold here, until a module or a role sets its own, or handlers."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    if levels and logging.lastResort is not None:  # what has a record that finds no handler, and only warnings
        logging.lastResort.setLevel(logging.NOTSET)
        logging.lastResort.setFormatter(logging.Formatter(logging.BASIC_FORMAT))


def split_label(line: str) -> tuple[str | None, str]:
    """The label and the text of a line that a worker has printed."""
    if line.startswith(_START):
        label, found, text = line[1:].partition(_END)
        if found:
            return label, text
    return None, line


def shown(line: str) -> str:
    """Return what a terminal shows of a line that carriage returns write over: the last that isn't empty."""
    states = line.split("\r")
    return next((state for state in reversed(states) if split_label(state)[1].strip()), states[0])


def written_over(rest: bytes) -> bytes:
    """Return what is still needed of a line that hasn't ended: its state, and the one before, as that may be empty."""
    return b"\r".join(rest.split(b"\r")[-2:])


class Tail(deque[str]):
    """The last lines of a worker's output; of one that is written over, the last state."""

    def __init__(self) -> None:
        super().__init__(maxlen=TAIL_LINES)

    def append(self, line: str) -> None:
        """Add a line, or with a carriage return at its end the state of one."""
        if self and self[-1].endswith("\r"):
            self.pop()
        super().append(line)

"""What role code prints, labelled with the role and its rank, so that the driver can say whose line it is."""

from __future__ import annotations

import io
import sys

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
            labelled = text.removesuffix("\n").replace("\n", f"\n{label}") + ("\n" if ended else "")
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


def split_label(line: str) -> tuple[str | None, str]:
    """The label and the text of a line that a worker has printed."""
    if line.startswith(_START):
        label, found, text = line[1:].partition(_END)
        if found:
            return label, text
    return None, line

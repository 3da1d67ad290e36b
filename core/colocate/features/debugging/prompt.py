"""The input and output of a debugger in a worker."""

from __future__ import annotations

import io
import queue
from typing import Protocol

_SHOWN_AT_ONCE = 1 << 16  # The maximal number of buffered characters.


class StopListener(Protocol):
    """The interface by which a `Terminal` reports stops to the driver."""

    def on_stop(self, terminal: Terminal, where: str, in_editor: bool) -> None:
        """Report a new stop to the driver, or a new position while the user steps."""

    def on_stop_ended(self, terminal: Terminal) -> None:
        """Report the end of a stop to the driver."""

    def show_text(self, terminal: Terminal, text: str, asks: bool) -> None:
        """Send a debugger's output to the driver."""


class Terminal(io.TextIOBase):
    """The text stream that a debugger reads from and writes to.

    Attributes:
        number: The stop's number; 0 between stops.
        lines: Typed lines; None for the end of the input.
    """

    def __init__(self, part: StopListener, error: str = "") -> None:
        self.error = error
        self.number = self.seq = self.rank = 0
        self.label = ""
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._part = part
        self._text: list[str] = []
        self._length = 0

    def start_stop(self, where: str, in_editor: bool = False) -> None:
        """Report to the driver that this thread has stopped, for a terminal or for an editor."""
        self._part.on_stop(self, where, in_editor)

    def end_stop(self) -> None:
        """Report the end of the stop, and prepare for the next stop."""
        self._show(asks=False)
        self._part.on_stop_ended(self)
        self.number, self.lines = 0, queue.SimpleQueue()

    def write(self, text: str) -> int:
        """Buffer output, which is sent when a line is requested or the buffer is full."""
        self._text.append(text)
        self._length += len(text)
        if self._length > _SHOWN_AT_ONCE:
            self._show(asks=False)
        return len(text)

    def flush(self) -> None:
        """Send buffered output if the last line is complete. A prompt is only sent when a line is requested.

        Until a line is requested, the terminal has no line editor, and Ctrl-D is ignored there.
        """
        if self._text and self._text[-1].endswith("\n"):
            self._show(asks=False)

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        """Return the next typed line, or "" at the end of the input."""
        self._show(asks=True)
        line = self.lines.get()
        if line is None:
            self.lines.put(None)
            return ""
        return line

    def _show(self, asks: bool) -> None:
        text = "".join(self._text)
        self._text.clear()
        self._length = 0
        if text or asks:
            self._part.show_text(self, text, asks)

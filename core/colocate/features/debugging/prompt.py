"""What a debugger in a worker reads from and writes to."""

from __future__ import annotations

import io
import queue
from typing import Protocol

_SHOWN_AT_ONCE = 1 << 16  # characters


class Teller(Protocol):
    """What tells the driver of stops."""

    def begin(self, terminal: Terminal, where: str, in_editor: bool) -> None:
        """Tell that a thread stops, or has stopped anew while somebody steps."""

    def end(self, terminal: Terminal) -> None:
        """Tell that a stop is over."""

    def show(self, terminal: Terminal, text: str, asks: bool) -> None:
        """Have something shown."""


class Terminal(io.TextIOBase):
    """What a debugger reads from and writes to.

    Attributes:
        number: That of the stop; 0 between two.
        lines: What was typed; None where nobody types any more.
    """

    def __init__(self, part: Teller, error: str = "") -> None:
        self.error = error
        self.number = self.seq = self.rank = 0
        self.label = ""
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._part = part
        self._text: list[str] = []
        self._length = 0

    def begin(self, where: str, in_editor: bool = False) -> None:
        """Stop, with the driver's terminals or an editor's."""
        self._part.begin(self, where, in_editor)

    def over(self) -> None:
        """Go on."""
        self._show(asks=False)
        self._part.end(self)
        self.number, self.lines = 0, queue.SimpleQueue()

    def write(self, text: str) -> int:
        """Show text, with what follows until a line is wanted."""
        self._text.append(text)
        self._length += len(text)
        if self._length > _SHOWN_AT_ONCE:
            self._show(asks=False)
        return len(text)

    def flush(self) -> None:
        """Show whole lines: the prompt follows once a line is wanted.

        Before that the terminal isn't its line editor's, and Ctrl-D is read there as nothing at all.
        """
        if self._text and self._text[-1].endswith("\n"):
            self._show(asks=False)

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        """Return the line that is typed; "" where nobody types any more."""
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
            self._part.show(self, text, asks)

"""All output of a run as a file: what the driver prints, and what its workers do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from colocate.driver import running_context

if TYPE_CHECKING:
    from colocate_run.logs import WorkerLogs

_TAIL_BYTES = 64 * 1024


@attrs.define(eq=False)
class RunLog:
    """Keeps what is printed, in memory first and in the run's folder as soon as that is known.

    A disk that is full ends the log and not the run; `fault` says so. Writing takes no lock, so that a signal's handler
    may print.
    """

    fault: str | None = None  # why nothing is written any more; None while all is well
    workers: WorkerLogs | None = None  # takes what roles print that are threads of this process
    _early: list[str] = attrs.field(factory=list, init=False)
    _file: FileIO | None = attrs.field(default=None, init=False)

    def open(self, path: Path) -> None:
        """Go on in a file, after what is in it already (of a run that is resumed)."""
        self._file = FileIO(path, "a")
        self.write("".join(self._early))
        self._early.clear()

    def write(self, text: str) -> None:
        """Keep some text."""
        if self._file is None:
            self._early.append(text)
        elif not self._file.closed:
            try:
                self._file.write(text.encode("utf-8", "backslashreplace"))
            except (OSError, ValueError) as error:  # ValueError: another thread closes it just now
                self.fault = self.fault or (str(error) if isinstance(error, OSError) else None)

    def close(self) -> None:
        """Keep nothing any more."""
        if self._file is not None:
            self._file.close()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Keep what is printed in the block, to standard output or error."""
        output, error = Tee(sys.stdout, self), Tee(sys.stderr, self)
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = output, error
        try:
            yield
        finally:
            if sys.stdout is output:  # unless somebody else has put another one there, and not taken it away
                sys.stdout = before[0]
            if sys.stderr is error:
                sys.stderr = before[1]


class Tee:
    """Stands for a stream: what is written goes there, and into a log."""

    def __init__(self, stream: Any, log: RunLog) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        """Write it to both."""
        written: int = self._stream.write(text)
        self._log.write(text)
        if self._log.workers is not None and (ctx := running_context()) is not None and ctx.hosted:
            self._log.workers.printed(ctx, text)
        return written

    def writelines(self, lines: Any) -> None:
        """Write all of them to both."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tail_of(path: Path) -> str:
    """The last part of a log, from a line's beginning; empty when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text if size <= _TAIL_BYTES else "...\n" + text.partition("\n")[2]

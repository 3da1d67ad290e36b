"""Write all output of a run, from the driver and the workers, to a file."""

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
    """A log of all printed text, which is in memory at first and then in the run's folder.

    A full disk ends the log, not the run; `fault` has the reason. Writing takes no lock, so that signal handlers may
    print.
    """

    fault: str | None = None  # The reason why writing has failed; None without a failure.
    workers: WorkerLogs | None = None  # Gets the output of roles on threads of this process.
    _early_text: list[str] = attrs.field(factory=list, init=False)
    _file: FileIO | None = attrs.field(default=None, init=False)

    def open_file(self, path: Path) -> None:
        """Open the log file, which may exist from before a resume, and append the text in memory."""
        self._file = FileIO(path, "a")
        self.write_text("".join(self._early_text))
        self._early_text.clear()

    def write_text(self, text: str) -> None:
        """Write a text to the log, or to memory before `open_file`."""
        if self._file is None:
            self._early_text.append(text)
        elif not self._file.closed:
            try:
                self._file.write(text.encode("utf-8", "backslashreplace"))
            except (OSError, ValueError) as error:  # A ValueError means that another thread is closing the file.
                self.fault = self.fault or (str(error) if isinstance(error, OSError) else None)

    def close(self) -> None:
        """Close the log; later texts are dropped."""
        if self._file is not None:
            self._file.close()

    @contextlib.contextmanager
    def capture_output(self) -> Iterator[None]:
        """A context manager that copies standard output and standard error to the log."""
        output, error = Tee(sys.stdout, self), Tee(sys.stderr, self)
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = output, error
        try:
            yield
        finally:
            if sys.stdout is output:  # Other code may have replaced the stream.
                sys.stdout = before[0]
            if sys.stderr is error:
                sys.stderr = before[1]


class Tee:
    """A stream that also writes to a log."""

    def __init__(self, stream: Any, log: RunLog) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        """Write to the stream and the log, and to a worker's log if a role on a thread of this process prints."""
        written: int = self._stream.write(text)
        self._log.write_text(text)
        if self._log.workers is not None and (ctx := running_context()) is not None and ctx.hosted:
            self._log.workers.on_print(ctx, text)
        return written

    def writelines(self, lines: Any) -> None:
        """Write all lines to the stream and the log."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def read_tail(path: Path) -> str:
    """Return the last part of a log, from the beginning of a line; empty if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text if size <= _TAIL_BYTES else "...\n" + text.partition("\n")[2]

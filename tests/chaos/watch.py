"""Watch a driver process from outside: its reports, and whether it hangs."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import attrs
from tests.chaos import marks
from tests.chaos.steps import HANG_S

_GRACE_S = 3.0  # the time for a driver to report a hang by itself
_STARTS_S = 120.0
_TAIL_BYTES = 6000
_CACHE = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), "torchinductor")}
"""Torch's cache for all later runs must not count as a leftover of one run."""


class Hung(Exception):
    """A driver's operation hasn't ended within the bound."""


class Ended(Exception):
    """A driver has exited without a request."""


@attrs.define(eq=False)
class Watched:
    """One driver process, in a folder of its own for its temporary files."""

    mark: str  # in the environment of all processes of the driver
    folder: Path  # for temporary files
    process: subprocess.Popen[str]
    begun: str = "start"  # the operation under way
    forked: list[int] = attrs.field(factory=list)  # children that outlive the driver on purpose
    _deadline: float = attrs.field(factory=lambda: time.monotonic() + _STARTS_S)
    _heard: queue.SimpleQueue[dict[str, Any] | None] = attrs.field(factory=queue.SimpleQueue)
    _log: Path | None = None
    _reader: threading.Thread = attrs.field(init=False)

    @classmethod
    def start(cls, executor: str, options: dict[str, Any], mark: str, *more: str, **env: str) -> Watched:
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        log = folder.with_suffix(".log")
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.driver", executor, json.dumps(options), mark, *more],
                env={**os.environ, **_CACHE, **env, "TMPDIR": str(folder), marks.MARK: mark},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        watched = cls(mark, folder, process, log=log)
        watched._reader = threading.Thread(target=watched._read, name="chaos-watch", daemon=True)
        watched._reader.start()
        return watched

    def ask(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self._deadline = time.monotonic() + _STARTS_S  # the driver may have been idle for long
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # `hear` raises `Ended`
            pass

    def hear(self) -> dict[str, Any]:
        """Return the next report, without begins of operations; raise `Hung` after a bound, `Ended` after an exit."""
        while True:
            try:
                told = self._heard.get(timeout=max(0.01, self._deadline - time.monotonic()))
            except queue.Empty:
                raise Hung(self.begun) from None
            if told is None:
                raise Ended(f"the driver ended with code {self.process.wait()} in {self.begun!r}:\n{self.tail()}")
            if "begin" not in told:
                return told

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:  # only this thread reads or closes the file
            for line in lines:
                told = json.loads(line)
                if "begin" in told:
                    self.begun = told["begin"]
                    patience = told["bound_s"] + HANG_S + _GRACE_S if self.begun else _STARTS_S
                    self._deadline = time.monotonic() + patience
                if "forked" in told:
                    self.forked.append(told["forked"])
                self._heard.put(told)
        self._heard.put(None)

    def stacks(self) -> str:
        """End the driver, which needn't respond; return the stacks of its threads."""
        self.process.send_signal(signal.SIGUSR1)
        try:
            self.process.wait(_GRACE_S)  # the process ends when the handler has written the stacks
        except subprocess.TimeoutExpired:
            pass  # the process is stopped: the log so far is returned
        return self.tail()

    def tail(self) -> str:
        assert self._log is not None
        return self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")

    def kill(self) -> float:
        at = time.monotonic()
        self.process.kill()
        return at

    def end(self) -> list[str]:
        """End the driver, by force if it doesn't exit; return the files that it has left."""
        self._say_no_more()
        try:
            self.process.wait(timeout=30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        left = self.files()
        self.clean()
        return left

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def clean(self) -> None:
        self._say_no_more()
        self._reader.join(_GRACE_S)  # longer only if a leftover process has the driver's stdout
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._log is not None:
            self._log.unlink(missing_ok=True)

    def _say_no_more(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:  # unread requests are lost with the process
            pass

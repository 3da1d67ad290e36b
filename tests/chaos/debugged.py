"""A user who debugs stopped ranks: attaches, types a few lines, and leaves in one way or another."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from types import TracebackType
from typing import Any

import attrs

from colocate.errors import ConfigError
from colocate.features.debugging.attach import AttachedTerminal, attach
from colocate.features.debugging.terminal import send_message

LOOKS_EVERY_S = 0.02
NOBODY = "no/such/rank"
WAYS = (("continue",), ("next", "continue"), ("p self.notes", "next", "next"), (None,), ())
"""The lines before the terminal closes; None is an end of file. The last way closes the terminal at once."""


@attrs.define(eq=False)
class Debugger:
    """A thread that debugs stopped ranks during the block."""

    seed: str
    _over: threading.Event = attrs.field(factory=threading.Event, init=False)
    _thread: threading.Thread | None = attrs.field(default=None, init=False)

    def __enter__(self) -> Debugger:
        self._thread = threading.Thread(target=self._debug, name="debugger", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        assert self._thread is not None
        self._thread.join()

    def _debug(self) -> None:
        draw, left = random.Random(f"debugger {self.seed}"), set[float]()
        while not self._over.wait(LOOKS_EVERY_S):
            with contextlib.suppress(ConfigError):  # no rank is stopped, or no longer
                listed = attach(os.getpid(), NOBODY)
                listed.close()
                waiting = [
                    each for each in listed.stopped_ranks or () if not each["terminal"] and each["since"] not in left
                ]
                if not waiting:
                    continue
                chosen = draw.choice(waiting)
                found = attach(os.getpid(), f"{chosen['group']}/{chosen['role']}/{chosen['rank']}")
                if found.stopped_ranks is None:
                    left.add(chosen["since"])  # a rank that a user has left isn't stopped any more
                    with contextlib.suppress(OSError):
                        _type(found, draw.choice(WAYS))
                found.close()


def _type(terminal: AttachedTerminal, lines: tuple[str | None, ...]) -> None:
    told: dict[str, Any] = dict(terminal.first)
    terminal.sock.settimeout(1.0)
    for line in lines:
        while not told.get("asks"):
            if "over" in told or not (read := terminal.lines.readline()):
                return
            told = json.loads(read)
        send_message(terminal.sock, {"line": line})
        told = {}

"""Another terminal of this machine comes to ranks that are stopped: `colocate debug`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from colocate._system.abstract import listening, user_of
from colocate.errors import ConfigError
from colocate.features.debugging.terminal import PATIENCE_S, address, send, talk


class Attached(NamedTuple):
    """A terminal that is attached, or is told what is stopped.

    Attributes:
        first: What has come first: what the rank shows, or what is stopped, of how many that were meant, and of how
            many of these without a terminal.
    """

    sock: socket.socket
    lines: IO[str]
    first: Mapping[str, Any]

    @property
    def stops(self) -> Sequence[Mapping[str, Any]] | None:
        """Return what is stopped, as plain data; None where this is attached."""
        found: Sequence[Mapping[str, Any]] | None = self.first.get("stops")
        return found

    def serve(self) -> int:
        """Be the terminal, on the main thread, until nobody needs it; returns the process's exit code."""
        return talk(self.sock, self.lines, self.first, own=False)

    def close(self) -> None:
        """Be gone."""
        with contextlib.suppress(OSError):  # the driver has ended
            self.sock.shutdown(socket.SHUT_RDWR)  # a thread that reads holds a lock, which `close` waits for
        self.lines.close()
        self.sock.close()


def stopped_drivers() -> list[int]:
    """Return the processes of this machine that have ranks which are stopped, of whichever user."""
    return sorted({int(each[1]) for each in listening(rf"{address('')[1:]}(\d+)")})


def attach(pid: int, which: str | None) -> Attached:
    """Attach this process to a rank that is stopped.

    Args:
        pid: The driver.
        which: The rank, as `[[GROUP/]ROLE/]RANK`; None for the only one.

    Raises:
        ConfigError: Nothing is stopped there, or it is another user's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lines = sock.makefile("r", encoding="utf-8", newline="\n")
    attached = Attached(sock, lines, {})
    try:
        sock.settimeout(PATIENCE_S)
        sock.connect(address(pid))
        if user_of(sock) != os.getuid() and os.getuid():  # who isn't the driver's user gets none of what is typed
            raise ConnectionResetError
        send(sock, {"attach": which})
        first = lines.readline()
        sock.settimeout(None)
    except (BrokenPipeError, ConnectionResetError):
        first = ""
    except OSError as error:
        attached.close()
        raise ConfigError(f"no rank of a run of process {pid} is stopped: {error}") from error
    if not first:
        attached.close()
        raise ConfigError(f"process {pid} is another user's, or has just ended")
    told = json.loads(first)
    if told.get("stops") == []:
        attached.close()
        raise ConfigError(f"no rank of a run of process {pid} is stopped")
    return attached._replace(first=told)

"""`colocate debug`: attaches another terminal on this machine to a stopped rank."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from colocate._system.abstract import listening, user_of
from colocate.errors import ConfigError
from colocate.features.debugging.terminal import PATIENCE_S, run_terminal, send_message, socket_address


class AttachedTerminal(NamedTuple):
    """A terminal's connection to a driver, attached to a stopped rank or refused with a list of stopped ranks.

    Attributes:
        first: The driver's first message, with the rank's output so far, or with all stopped ranks, the number of ranks
            that match, and the number of matching ranks without a terminal.
    """

    sock: socket.socket
    lines: IO[str]
    first: Mapping[str, Any]

    @property
    def stopped_ranks(self) -> Sequence[Mapping[str, Any]] | None:
        """The stopped ranks as plain data; None if this terminal is attached to a rank."""
        stops_listed: Sequence[Mapping[str, Any]] | None = self.first.get("stops")
        return stops_listed

    def run_terminal(self) -> int:
        """Run the terminal on the main thread until the session ends, and return the process's exit code."""
        return run_terminal(self.sock, self.lines, self.first, own=False)

    def close(self) -> None:
        """Close the connection to the driver."""
        with contextlib.suppress(OSError):  # The driver may have ended.
            self.sock.shutdown(socket.SHUT_RDWR)  # This wakes a reading thread, which holds a lock that `close` needs.
        self.lines.close()
        self.sock.close()


def list_stopped_drivers() -> list[int]:
    """Return the pids of all drivers on this machine that have stopped ranks, including other users' drivers."""
    return sorted({int(match[1]) for match in listening(rf"{socket_address('')[1:]}(\d+)")})


def attach(pid: int, which: str | None) -> AttachedTerminal:
    """Attach this process to a stopped rank.

    Args:
        pid: The driver's process.
        which: The rank, as `[[GROUP/]ROLE/]RANK`; None for the only stopped rank.

    Raises:
        ConfigError: No rank is stopped there, or the driver is another user's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lines = sock.makefile("r", encoding="utf-8", newline="\n")
    attached = AttachedTerminal(sock, lines, {})
    try:
        sock.settimeout(PATIENCE_S)
        sock.connect(socket_address(pid))
        if user_of(sock) != os.getuid() and os.getuid():  # Typed lines must not reach another user's process.
            raise ConnectionResetError
        send_message(sock, {"attach": which})
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
    answer = json.loads(first)
    if answer.get("stops") == []:
        attached.close()
        raise ConfigError(f"no rank of a run of process {pid} is stopped")
    return attached._replace(first=answer)

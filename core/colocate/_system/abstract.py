"""Look up abstract Unix sockets, by which processes of a machine find each other: list names, and identify peers."""

from __future__ import annotations

import re
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, user and group of a process


def listening(name: str) -> list[re.Match[str]]:
    """Return the matches of abstract sockets that a process of any user listens on.

    Args:
        name: A regular expression for the socket's name.
    """
    listed = Path("/proc/net/unix").read_text(errors="replace")
    return [*re.finditer(rf"^\S+ \S+ \S+ 00010000 .* @{name}$", listed, re.MULTILINE)]


def user_of(sock: socket.socket) -> int:
    """Return the user of a socket's peer, as the kernel reports."""
    user: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return user

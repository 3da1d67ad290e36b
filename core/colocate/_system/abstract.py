"""Sockets without a file, by which processes of a machine find each other: which there are, and who is at one's end."""

from __future__ import annotations

import re
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # of a process: pid, user, group


def listening(name: str) -> list[re.Match[str]]:
    """Return the matches of those to which somebody listens, of whichever user. Args: name: A pattern of names."""
    listed = Path("/proc/net/unix").read_text(errors="replace")
    return [*re.finditer(rf"^\S+ \S+ \S+ 00010000 .* @{name}$", listed, re.MULTILINE)]


def user_of(sock: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel says."""
    user: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return user

"""The detection of servers that don't answer.

Ray notices such a server only after many seconds, and places nothing for anybody while it waits for the server.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Collection, Mapping

# Every gRPC client sends these bytes first, and a server answers with HTTP/2 settings.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_ANSWERS_WITHIN_S = 1.0
ID = "ray.io/node-id"  # Ray sets this label on each node.
_STILL_SILENT_WITHIN_S = 0.2  # A silent server that has recovered answers at once.


class SilentNodes:
    """A record of the servers that didn't answer the last check. The next check waits less for these servers."""

    def __init__(self) -> None:
        self._silent: frozenset[str] = frozenset()

    def find_silent(self, servers: Mapping[str, tuple[str, int]]) -> frozenset[str]:
        """Return the servers that don't answer a gRPC greeting. All servers are asked at the same time.

        Args:
            servers: Host and port of each server, by any name.
        """
        known_silent = self._silent & servers.keys()
        answered = find_answering({name: servers[name] for name in servers.keys() - known_silent}, _ANSWERS_WITHIN_S)
        answered |= find_answering({name: servers[name] for name in known_silent}, _STILL_SILENT_WITHIN_S)
        silent = servers.keys() - answered
        self._silent = self._silent - servers.keys() | silent
        return frozenset(silent)


def find_answering(servers: Mapping[str, tuple[str, int]], within_s: float) -> set[str]:
    """Return the servers that answer a gRPC greeting in any way. All servers are asked at the same time.

    An answer proves that the server's process is alive, and not only the kernel of its machine. With TLS, an accepted
    connection counts as an answer, because a handshake isn't worth the effort.
    """
    answering_names, deadline = set[str](), time.monotonic() + within_s
    says = os.environ.get("RAY_USE_TLS", "0").lower() in ("0", "false", "")
    with contextlib.ExitStack() as ends:
        news, sockets = select.poll(), dict[int, tuple[str, socket.socket]]()
        for name, (host, port) in servers.items():
            sock = ends.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            sock.setblocking(False)
            with contextlib.suppress(OSError):  # The address may be invalid.
                sock.connect_ex((host, port))
                sockets[sock.fileno()] = name, sock
                news.register(sock, select.POLLOUT)
        while sockets and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, events in news.poll(left_s * 1000):
                name, sock = sockets[descriptor]
                connected = events & select.POLLIN or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if connected and says and not events & select.POLLIN:
                    with contextlib.suppress(OSError):  # A closed connection is an answer too.
                        sock.send(HELLO)
                    news.modify(sock, select.POLLIN)
                    continue
                if connected:
                    answering_names.add(name)
                news.unregister(sock)
                del sockets[descriptor]
    return answering_names


def exclude_nodes(silent: Collection[str]) -> dict[str, str]:
    """Return a label selector for Ray that excludes the silent nodes."""
    return {ID: f"!in({','.join(sorted(silent))})"} if silent else {}

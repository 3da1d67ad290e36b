"""Detection of silent servers: Ray notices after many seconds, and places nothing for anybody while waiting on one."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Collection, Mapping

# The greeting of any gRPC client; a server answers with settings.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_ANSWERS_WITHIN_S = 1.0
ID = "ray.io/node-id"  # Ray's own label of each node
_STILL_SILENT_WITHIN_S = 0.2  # seconds; a silent server that has recovered answers at once


class Silence:
    """The servers that didn't answer last time: the next check of these waits less."""

    def __init__(self) -> None:
        self._silent: frozenset[str] = frozenset()

    def among(self, servers: Mapping[str, tuple[str, int]]) -> frozenset[str]:
        """Return the servers that don't answer a gRPC greeting; all are asked at once.

        Args:
            servers: Hosts and ports, by any name.
        """
        known_silent = self._silent & servers.keys()
        answered = answering({name: servers[name] for name in servers.keys() - known_silent}, _ANSWERS_WITHIN_S)
        answered |= answering({name: servers[name] for name in known_silent}, _STILL_SILENT_WITHIN_S)
        silent = servers.keys() - answered
        self._silent = self._silent - servers.keys() | silent
        return frozenset(silent)


def answering(servers: Mapping[str, tuple[str, int]], within_s: float) -> set[str]:
    """Return the servers that answer a gRPC greeting in any way; all are asked at once.

    An answer comes from the server's process, not only from the kernel of its machine. With TLS, an accepted connection
    counts as an answer: a handshake isn't worth the effort.
    """
    answering_names, deadline = set[str](), time.monotonic() + within_s
    says = os.environ.get("RAY_USE_TLS", "0").lower() in ("0", "false", "")
    with contextlib.ExitStack() as ends:
        news, sockets = select.poll(), dict[int, tuple[str, socket.socket]]()
        for name, (host, port) in servers.items():
            sock = ends.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            sock.setblocking(False)
            with contextlib.suppress(OSError):  # no valid address
                sock.connect_ex((host, port))
                sockets[sock.fileno()] = name, sock
                news.register(sock, select.POLLOUT)
        while sockets and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, events in news.poll(left_s * 1000):
                name, sock = sockets[descriptor]
                connected = events & select.POLLIN or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if connected and says and not events & select.POLLIN:
                    with contextlib.suppress(OSError):  # a closed connection is an answer too
                        sock.send(HELLO)
                    news.modify(sock, select.POLLIN)
                    continue
                if connected:
                    answering_names.add(name)
                news.unregister(sock)
                del sockets[descriptor]
    return answering_names


def elsewhere(silent: Collection[str]) -> dict[str, str]:
    """Return a label selector of Ray's that excludes nodes by id."""
    return {ID: f"!in({','.join(sorted(silent))})"} if silent else {}

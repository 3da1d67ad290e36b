"""Who doesn't answer: Ray finds out after many seconds, and has placed nothing for anybody since it tried to there."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Collection, Mapping

# What any gRPC client says first; a server answers with its settings.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_ANSWERS_WITHIN_S = 1.0
ID = "ray.io/node-id"  # Ray's own label of each node
_STILL_SILENT_WITHIN_S = 0.2  # who was silent just now, and answers again, does so at once


class Silence:
    """The servers that didn't answer when they were asked last: whoever asks for them again needn't wait so long."""

    def __init__(self) -> None:
        """Begin with nodes that have all answered."""
        self._silent: frozenset[str] = frozenset()

    def among(self, servers: Mapping[str, tuple[str, int]]) -> frozenset[str]:
        """Ask servers by gRPC, all at once; return those that don't answer.

        Args:
            servers: Their hosts and ports, by whatever they are called.
        """
        known = self._silent & servers.keys()
        answered = answering({name: servers[name] for name in servers.keys() - known}, _ANSWERS_WITHIN_S)
        answered |= answering({name: servers[name] for name in known}, _STILL_SILENT_WITHIN_S)
        silent = servers.keys() - answered
        self._silent = self._silent - servers.keys() | silent
        return frozenset(silent)


def answering(servers: Mapping[str, tuple[str, int]], within_s: float) -> set[str]:
    """Ask servers by gRPC, all at once; return those that answer, whatever they say.

    Their process does, not only the kernel of their machine: unless they use TLS, for which it isn't worth it.
    """
    found, deadline = set[str](), time.monotonic() + within_s
    says = os.environ.get("RAY_USE_TLS", "0").lower() in ("0", "false", "")
    with contextlib.ExitStack() as ends:
        news, asked = select.poll(), dict[int, tuple[str, socket.socket]]()
        for name, (host, port) in servers.items():
            sock = ends.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            sock.setblocking(False)
            with contextlib.suppress(OSError):  # no address
                sock.connect_ex((host, port))
                asked[sock.fileno()] = name, sock
                news.register(sock, select.POLLOUT)
        while asked and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, events in news.poll(left_s * 1000):
                name, sock = asked[descriptor]
                connected = events & select.POLLIN or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if connected and says and not events & select.POLLIN:
                    with contextlib.suppress(OSError):  # it has closed, which is an answer
                        sock.send(HELLO)
                    news.modify(sock, select.POLLIN)
                    continue
                if connected:
                    found.add(name)
                news.unregister(sock)
                del asked[descriptor]
    return found


def elsewhere(silent: Collection[str]) -> dict[str, str]:
    """The label selector of Ray's that keeps off some nodes, by their ids."""
    return {ID: f"!in({','.join(sorted(silent))})"} if silent else {}

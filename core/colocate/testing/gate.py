"""`Gate`: role code waits until a test opens the gate, in threads, in processes and on other machines."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import TracebackType
from typing import ClassVar, Self

from colocate.testing.waiting import PATIENCE_S

Address = tuple[str, int]


class Gate:
    """A gate, closed at first, where role code waits until a test opens it. Leaving the `with` block opens it, too."""

    host: ClassVar[str] = "127.0.0.1"  # The address at which workers reach the test, set by `ExecutorCase`.

    def __init__(self) -> None:
        self._listener = socket.create_server((self.host, 0), backlog=64)
        self._listener.settimeout(PATIENCE_S)
        self._waiting: list[socket.socket] = []
        host, port = self._listener.getsockname()[:2]
        self.address: Address = (host, port)

    def wait_for(self, count: int = 1) -> None:
        """Wait until `count` more callers have arrived at the gate."""
        for _ in range(count):
            self._waiting.append(self._listener.accept()[0])

    def wait_for_none(self) -> None:
        """Wait until all waiting callers have disconnected, although the gate is still closed."""
        for waiting in self._waiting:
            waiting.settimeout(PATIENCE_S)
            assert not waiting.recv(1)

    def open(self) -> None:
        """Open the gate for all waiting and all later callers."""
        self._listener.close()  # Unaccepted connections are reset, and later connections are refused.
        for waiting in self._waiting:
            waiting.close()
        self._waiting.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()


def pass_gate(address: Address) -> None:
    """Connect to a gate, and wait until the gate is open."""
    with contextlib.suppress(OSError), socket.create_connection(address) as connection:
        if not _connect_to_itself(connection):
            _poll_until_open(connection)
            connection.recv(1)


async def pass_gate_async(address: Address) -> None:
    """Wait until a gate is open, without blocking the lane."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*address)
        try:
            if not _connect_to_itself(writer.get_extra_info("socket")):
                _poll_until_open(writer.get_extra_info("socket"))
                await reader.read(1)
        finally:
            writer.close()


def is_open(address: Address) -> bool:
    """Return whether a gate has been opened."""
    try:
        with socket.create_connection(address) as connection:
            return _connect_to_itself(connection)
    except OSError:  # An open gate refuses or resets connections.
        return True


def _connect_to_itself(connection: socket.socket) -> bool:
    # A TCP socket may connect to itself if nobody listens on the requested port.
    to_itself: bool = connection.getsockname() == connection.getpeername()
    return to_itself


def _poll_until_open(connection: socket.socket) -> None:
    # Keepalive ends the wait of a caller whose connection the kernel drops without a reset while the gate opens.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)

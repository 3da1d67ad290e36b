"""A gate that role code waits at until the test opens it: in threads, processes and on other machines alike."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import TracebackType
from typing import ClassVar, Self

from colocate.testing.waiting import PATIENCE_S

Address = tuple[str, int]


class Gate:
    """Made closed by a test, which opens it at its end at the latest; a context manager that does so."""

    host: ClassVar[str] = "127.0.0.1"  # where workers reach the test; `ExecutorCase.address` sets it

    def __init__(self) -> None:
        self._listener = socket.create_server((self.host, 0), backlog=64)
        self._listener.settimeout(PATIENCE_S)
        self._waiting: list[socket.socket] = []
        host, port = self._listener.getsockname()[:2]
        self.address: Address = (host, port)

    def wait_for(self, count: int = 1) -> None:
        """Wait until so many more have come to the gate."""
        for _ in range(count):
            self._waiting.append(self._listener.accept()[0])

    def wait_for_none(self) -> None:
        """Wait until everybody who has come is gone again, though it isn't open."""
        for waiting in self._waiting:
            waiting.settimeout(PATIENCE_S)
            assert not waiting.recv(1)

    def open(self) -> None:
        """Let everybody through, from now on."""
        self._listener.close()  # who hasn't been accepted is reset, who comes later is refused
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
    """Wait at a gate until it is open."""
    with contextlib.suppress(OSError), socket.create_connection(address) as connection:
        if not _to_itself(connection):
            _ask_now_and_then(connection)
            connection.recv(1)


async def pass_gate_async(address: Address) -> None:
    """As `pass_gate`, without keeping the lane."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*address)
        try:
            if not _to_itself(writer.get_extra_info("socket")):
                _ask_now_and_then(writer.get_extra_info("socket"))
                await reader.read(1)
        finally:
            writer.close()


def is_open(address: Address) -> bool:
    """Whether a gate has been opened already."""
    try:
        with socket.create_connection(address) as connection:
            return _to_itself(connection)
    except OSError:  # refused, or reset before it could be looked at
        return True


def _to_itself(connection: socket.socket) -> bool:
    # TCP may connect a socket to itself when nobody listens on a port of the range it takes its own from.
    to_itself: bool = connection.getsockname() == connection.getpeername()
    return to_itself


def _ask_now_and_then(connection: socket.socket) -> None:
    # Who connects in the very moment in which the gate is opened may be forgotten by the kernel instead of reset, and
    # would wait for ever: seen once, in a run of all tests on a busy machine.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)

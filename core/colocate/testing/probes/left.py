"""Roles that leave tasks or a server in their event loop, which continues between calls."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from colocate import First, Role, method
from colocate.testing.gate import Address, pass_gate_async


class Server(Role):
    """A role that starts a server and a timer in its constructor."""

    def __init__(self, gate: Address) -> None:
        loop = asyncio.get_event_loop()
        self.server = loop.run_until_complete(asyncio.start_server(self.answer, gate[0], 0))
        loop.call_later(0.01, self.tick, gate)

    def tick(self, gate: Address) -> None:
        self.task = asyncio.get_event_loop().create_task(pass_gate_async(gate))

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper())
        writer.close()

    @method(collect=First())
    def address(self) -> Address:
        host, port = self.server.sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Close the server in the event loop that runs the server."""
        self.server.close()
        await self.server.wait_closed()


class Leaves(Role):
    """A role whose methods leave tasks in the event loop."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    @method
    async def comes_to(self, gate: Address) -> None:
        """Leave a task that connects to a gate some time after this method has ended."""
        self.tasks.append(asyncio.ensure_future(self._comes_to(gate)))

    @method
    def begins(self, gate: Address) -> None:
        """Leave the task of `comes_to`, by a method that isn't async."""
        self.tasks.append(asyncio.get_event_loop().create_task(self._comes_to(gate)))

    @staticmethod
    async def _comes_to(gate: Address) -> None:
        for _ in range(3):
            await asyncio.sleep(0.01)
            await asyncio.to_thread(str)  # No event loop tracks this thread.
        await pass_gate_async(gate)

    @method
    async def writes_at_its_end(self, file: Path) -> None:
        """Leave a task that writes a file when the task is cancelled."""
        self.tasks.append(asyncio.ensure_future(self._writes(file)))

    async def _writes(self, file: Path) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            file.with_name(f"{file.name}-{self.ctx.rank}").write_text("ended")

    @method
    async def fails(self, words: str) -> None:
        """Leave a task that raises an error."""
        asyncio.ensure_future(self._fails(words))  # noqa: RUF006

    @staticmethod
    async def _fails(words: str) -> None:
        await asyncio.sleep(0.01)
        raise ValueError(words)

    @method
    def raises(self) -> None:
        raise ValueError("a method")

    async def close(self) -> None:
        """Await the tasks that have ended or were cancelled."""
        for task in self.tasks:
            if task.done():
                with contextlib.suppress(ValueError):
                    await task

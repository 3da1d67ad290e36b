"""Roles that start processes by `ctx.start`, and the programs of these processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.suite.probes.served import NOTES, serve

import colocate
from colocate import Child, ChildDied, First, Role, method
from colocate.testing.gate import Address, pass_gate, pass_gate_async
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch

    from colocate import Weights
else:
    torch = import_optional("torch")


class Starter(Role):
    """A role that starts a child of each kind on request."""

    def __init__(self, fails: str | None = None) -> None:
        self.child: Child
        if fails is not None:
            self.child = self.ctx.start(partial(serve, first="made"), name="server", fails=fails)  # type: ignore[arg-type]

    @method(collect=First(), revives=True)
    def serve(
        self, first: str = "", name: str = "server", fails: Any = "call", health: Any = None, python: str | None = None
    ) -> int:
        """Start a function as the child."""
        options: dict[str, Any] = {"health": partial(is_healthy, health), "hung_after": 0.3} if health else {}
        self.child = self.ctx.start(partial(serve, first=first), name=name, fails=fails, python=python, **options)
        return self.child.pid

    @method(collect=First())
    def command(self, /, command: Sequence[str], **options: Any) -> tuple[int, int | None]:
        """Start a command as the child."""
        if "line" in options:
            options["ready"] = re.compile(options.pop("line"))
        self.child = self.ctx.start(command, **options)
        return self.child.pid, self.child.port

    @method(collect=First())
    def start(self, /, what: Any, **options: Any) -> None:
        """Start a child without keeping its handle."""
        self.ctx.start(what, **options)

    @method(collect=First())
    def ask(self, *asked: Any) -> Any:
        """Send commands to the child, and return its next answer."""
        for command in asked:
            assert self.child.connection is not None
            self.child.connection.send(command)
        assert self.child.connection is not None
        return self.child.connection.recv()

    @method(collect=First())
    def wait(self, gate: Address) -> None:
        """Wait in Python code for a value that never comes."""
        pass_gate(gate)
        queue.Queue[int]().get()

    @method(collect=First())
    async def wait_async(self, gate: Address) -> None:
        await pass_gate_async(gate)
        await asyncio.Event().wait()

    @method(collect=First())
    def pass_gate(self, gate: Address) -> None:
        """Wait at a gate, which on threads no child's death interrupts."""
        pass_gate(gate)

    @method(collect=First())
    def recovers(self, gate: Address) -> Any:
        """Start the child again in the call that receives ChildDied."""
        try:
            self.wait(gate)
        except ChildDied:
            self.serve("again")
            return self.ask("now")

    @method(collect=First())
    def keep_the_gil(self, seconds: float) -> None:
        """Hold the GIL for some seconds."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    @method(collect=First())
    def asks_again(self) -> Any:
        """Kill the child, get ChildDied from the connection, and start the child again."""
        os.kill(self.child.pid, signal.SIGKILL)
        try:
            self.ask()
        except ChildDied:
            self.serve("again")
            return self.ask("now")

    @method(collect=First(), revives=True)
    def seen(self) -> tuple[bool, int | None, str, str]:
        """Return whether the child is alive, its exit code, its state and its output."""
        return self.child.alive, self.child.exitcode, self.child.state, self.child.output

    @method(collect=First(), revives=True)
    def stop(self) -> str:
        self.child.stop()
        return self.child.state

    @method(collect=First())
    def end(self, how: str, seconds: float) -> str:
        """Stop the child, or wait for its exit; return its state."""
        getattr(self.child, how)(seconds)
        return self.child.state

    @method(collect=First())
    def wait_too_short(self) -> str:
        try:
            self.child.wait(0.01)
        except TimeoutError as error:
            return str(error)
        return ""

    @method(collect=First())
    def run(self, command: Sequence[str]) -> tuple[int | None, str]:
        """Run a command to its end."""
        child = self.ctx.start(command, fails=None)
        return child.wait(), child.output

    @method(collect=First())
    def pid(self) -> int:
        return os.getpid()


class Playing(Role):
    """A role with a child for each row."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    @method(rows="row", concurrency=4)
    async def play(self, row: str, gate: Address | None = None) -> tuple[str, str]:
        """Ask the row's own child, which some rows kill first."""
        child = await asyncio.to_thread(self.ctx.start, serve)
        self.pids.append(child.pid)
        assert child.connection is not None
        if gate is not None:
            await pass_gate_async(gate)
        if row == "dies":
            os.kill(child.pid, signal.SIGKILL)
            await asyncio.Event().wait()
        elif row == "asks the dead":
            child.connection.send("exit")
            child.connection.recv()
        child.connection.send(row)
        answer: tuple[str, str] = await asyncio.to_thread(child.connection.recv)
        return answer

    @method(collect=First())
    def seen(self) -> list[int]:
        """Return the pids of all children so far."""
        return self.pids


class Patient(Role):
    """A role with a live child, whose calls fail for other reasons."""

    def __init__(self) -> None:
        self.child = self.ctx.start(serve, name="server")
        self.is_watched, self.raised_at = False, 0.0

    @method(rows="what", concurrency=2)
    async def play(self, what: str) -> float:
        """See `act`."""
        return await self._act(what)

    @method(collect=First(), concurrency=2)
    async def act(self, what: str) -> float:
        """Fail, or measure how long the event loop was blocked after another call's failure."""
        return await self._act(what)

    async def _act(self, what: str) -> float:
        if what == "watch":
            self.is_watched, self.raised_at = True, 0.0
            while not self.raised_at:
                await asyncio.sleep(0.001)
            return time.monotonic() - self.raised_at
        while not self.is_watched and what != "dies":
            await asyncio.sleep(0.001)
        self.is_watched, self.raised_at = False, time.monotonic()
        if what == "timeout":
            await asyncio.wait_for(asyncio.Event().wait(), 0)
        if what == "dies":
            os.kill(self.child.pid, signal.SIGKILL)
        raise FileNotFoundError(what) if what == "file" else ConnectionResetError(what)


class Served(Role):
    """A role with one child for all rows."""

    def __init__(self) -> None:
        self.child = self.ctx.start(serve, name="server")

    @method(revives=True)
    def begin(self) -> None:
        """Start the child again if it has died."""
        if not self.child.alive:
            self.child = self.ctx.start(serve, name="server")

    @method(rows="row", concurrency=2)
    async def play(self, row: str) -> int:
        """Return the rank; on rank 0 the row 'dies' kills the child and waits."""
        if row == "dies" and self.ctx.rank == 0:
            os.kill(self.child.pid, signal.SIGKILL)
            await asyncio.Event().wait()
        return self.ctx.rank


def run_engine(connection: Any) -> None:
    """Store received weights, and answer each command with their sums."""
    held: dict[str, Any] = {}
    while (command := connection.recv()) is not None:
        if command == "load":
            with contextlib.suppress(colocate.ColocateError):
                for name, tensor in colocate.torch.receive_weights(connection):
                    held[name] = tensor.clone()
        elif command == "one":
            weights = colocate.torch.receive_weights(connection)
            next(weights)
            weights.close()
        elif command == "die":
            name, tensor = next(colocate.torch.receive_weights(connection))
            os._exit(1)
        connection.send({name: (str(weight.dtype), float(weight.double().sum())) for name, weight in held.items()})


class Engines(Role):
    """A target whose weights are in a child."""

    def __init__(self) -> None:
        self.begin()

    @method(revives=True)
    def begin(self) -> None:
        self.child, self.how = self.ctx.start(run_engine), "load"

    @method
    def die_next(self) -> None:
        self.how = "die"

    @method
    def take_one_next(self) -> None:
        self.how = "one"

    def load_weights(self, weights: Weights, version: int) -> None:
        assert self.child.connection is not None
        self.child.connection.send(self.how)
        self.how = "load"
        try:
            colocate.torch.send_weights(self.child.connection, weights, bucket=4096)
        finally:
            self.held = self.child.connection.recv()

    @method(collect=First())
    def sums(self) -> Any:
        """Return the sums of the child's weights, by name."""
        return self.held


class WeightGiver(Role):
    """A source with weights of several dtypes and sizes."""

    def __init__(self) -> None:
        whole = torch.arange(3000, dtype=torch.float32, device=self.ctx.device)
        self.weights = {
            "large": whole.view(30, 100).t(),
            "half": whole[:100].to(torch.bfloat16),
            "one": torch.tensor(2.5, device=self.ctx.device),
            "none": torch.empty(0, 3, device=self.ctx.device),
            "whole": torch.arange(7, device=self.ctx.device),
        }
        self.fails = False

    @method
    def double(self) -> None:
        for tensor in self.weights.values():
            tensor.mul_(2)

    @method
    def fail_next(self) -> None:
        self.fails = True

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self.weights.items():
            if name == "one" and self.fails:
                self.fails = False
                raise ArithmeticError("no more of them")
            yield name, tensor

    @method(collect=First())
    def sums(self) -> Any:
        """Return the sums that the child should report."""
        return {name: (str(tensor.dtype), float(tensor.double().sum())) for name, tensor in self.weights.items()}


class User(Role):
    """A role that waits for a child through a sibling."""

    @method(collect=First())
    def wait(self, gate: Address) -> None:
        self.ctx.sibling("starter", Starter).wait(gate)

    @method(collect=First())
    def fine(self) -> int:
        return self.ctx.rank


class FileRecorder(Role):
    """A role that writes to a file the order in which children and role end."""

    def __init__(self, file: str) -> None:
        self.file = file
        for name in ("a", "b"):
            self.ctx.start([sys.executable, "-c", NOTES, file, name], name=name, ready="on")

    @method
    def noop(self) -> None: ...

    def close(self) -> None:
        with Path(self.file).open("a") as file:
            file.write("close ")


def is_healthy(file: str, child: Child) -> bool:
    """Return whether the file that marks the child as ill is absent."""
    return not Path(file).exists()

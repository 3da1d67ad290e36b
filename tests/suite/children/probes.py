"""Roles that start processes by `ctx.start`, and what these run."""

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
    """Has a child of each kind that it is asked for."""

    def __init__(self, fails: str | None = None) -> None:
        self.child: Child
        if fails is not None:
            self.child = self.ctx.start(partial(serve, first="made"), name="server", fails=fails)  # type: ignore[arg-type]

    @method(collect=First(), revives=True)
    def serve(
        self, first: str = "", name: str = "server", fails: Any = "call", health: Any = None, python: str | None = None
    ) -> int:
        """Start a function."""
        options: dict[str, Any] = {"health": partial(is_healthy, health), "hung_after": 0.3} if health else {}
        self.child = self.ctx.start(partial(serve, first=first), name=name, fails=fails, python=python, **options)
        return self.child.pid

    @method(collect=First())
    def command(self, /, command: Sequence[str], **options: Any) -> tuple[int, int | None]:
        """Start a command."""
        if "line" in options:
            options["ready"] = re.compile(options.pop("line"))
        self.child = self.ctx.start(command, **options)
        return self.child.pid, self.child.port

    @method(collect=First())
    def start(self, /, what: Any, **options: Any) -> None:
        """Start anything."""
        self.ctx.start(what, **options)

    @method(collect=First())
    def ask(self, *asked: Any) -> Any:
        """Ask the child something, and wait for what only it can answer."""
        for command in asked:
            assert self.child.connection is not None
            self.child.connection.send(command)
        assert self.child.connection is not None
        return self.child.connection.recv()

    @method(collect=First())
    def wait(self, gate: Address) -> None:
        """Wait in Python code for what never comes."""
        pass_gate(gate)
        queue.Queue[int]().get()

    @method(collect=First())
    async def wait_async(self, gate: Address) -> None:
        await pass_gate_async(gate)
        await asyncio.Event().wait()

    @method(collect=First())
    def pass_gate(self, gate: Address) -> None:
        """Wait at a gate, which no end of a child opens on threads."""
        pass_gate(gate)

    @method(collect=First())
    def recovers(self, gate: Address) -> Any:
        """Start it again in the call that has heard of its end."""
        try:
            self.wait(gate)
        except ChildDied:
            self.serve("again")
            return self.ask("now")

    @method(collect=First())
    def keep_the_gil(self, seconds: float) -> None:
        """Have nothing else of this process run for a while."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    @method(collect=First())
    def asks_again(self) -> Any:
        """Hear by its connection that it is gone, and start it again."""
        os.kill(self.child.pid, signal.SIGKILL)
        try:
            self.ask()
        except ChildDied:
            self.serve("again")
            return self.ask("now")

    @method(collect=First(), revives=True)
    def seen(self) -> tuple[bool, int | None, str, str]:
        """Whether it is alive, its exit code, its state and its output."""
        return self.child.alive, self.child.exitcode, self.child.state, self.child.output

    @method(collect=First(), revives=True)
    def stop(self) -> str:
        self.child.stop()
        return self.child.state

    @method(collect=First())
    def end(self, how: str, seconds: float) -> str:
        """Stop the child, or wait for its end; what it does then."""
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
    """Has a child for each row."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    @method(rows="row", concurrency=4)
    async def play(self, row: str, gate: Address | None = None) -> tuple[str, str]:
        """Ask the row's own child, which dies first in some."""
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
        """The children that it has had."""
        return self.pids


class Patient(Role):
    """Has a child that lives, and fails of other things."""

    def __init__(self) -> None:
        self.child = self.ctx.start(serve, name="server")
        self.is_watched, self.raised_at = False, 0.0

    @method(rows="what", concurrency=2)
    async def play(self, what: str) -> float:
        """See `act`."""
        return await self._act(what)

    @method(collect=First(), concurrency=2)
    async def act(self, what: str) -> float:
        """Fail, or tell how long the event loop stood still after somebody beside this has failed."""
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
    """Has one child for all rows."""

    def __init__(self) -> None:
        self.child = self.ctx.start(serve, name="server")

    @method(revives=True)
    def begin(self) -> None:
        """Start it again where it has died."""
        if not self.child.alive:
            self.child = self.ctx.start(serve, name="server")

    @method(rows="row", concurrency=2)
    async def play(self, row: str) -> int:
        """The rank; on the first one some kill the child, and wait."""
        if row == "dies" and self.ctx.rank == 0:
            os.kill(self.child.pid, signal.SIGKILL)
            await asyncio.Event().wait()
        return self.ctx.rank


def run_engine(connection: Any) -> None:
    """Have weights of its own, and tell their sum."""
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
    """Has the weights of another role in a child."""

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
        """Return what the child has, by name."""
        return self.held


class WeightGiver(Role):
    """Has weights of several kinds and sizes."""

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
        """The same as the child tells."""
        return {name: (str(tensor.dtype), float(tensor.double().sum())) for name, tensor in self.weights.items()}


class User(Role):
    """Uses the other role's child by that role's object."""

    @method(collect=First())
    def wait(self, gate: Address) -> None:
        self.ctx.sibling("starter", Starter).wait(gate)

    @method(collect=First())
    def fine(self) -> int:
        return self.ctx.rank


class RecordingOrder(Role):
    """Notes in a file what ends when."""

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
    """Whether a file isn't there that says otherwise."""
    return not Path(file).exists()

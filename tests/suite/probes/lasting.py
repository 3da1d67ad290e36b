"""Roles whose state outlives their workers, or doesn't."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import attrs

from colocate import OnRank, PerRank, Role, method
from colocate.testing.gate import Address, pass_gate
from colocate.testing.probes.lasting import Lasting


class CallableSaver(Lasting):
    """A role whose `save` and `restore` are role methods, too.

    Args:
        gate: The gate at which `restore` waits after reading; None for no gate.
    """

    def __init__(self, gate: Address | None = None) -> None:
        super().__init__()
        self.gate = gate

    @method
    async def save(self, directory: str) -> None:  # type: ignore[override]  # pyright: ignore
        super().save(directory)

    @method
    def restore(self, directory: str) -> None:  # type: ignore[override]  # pyright: ignore
        super().restore(directory)
        if self.gate is not None:
            pass_gate(self.gate)


class LaterSaver(Lasting):
    """A role whose files are written after `save` has returned, on rank 0 once a gate is open.

    Args:
        how: The kind of pending write that `save` returns, or its fault.
        gate: The gate before writing; None for no gate.
    """

    def __init__(self, how: str, gate: Address | None = None) -> None:
        super().__init__()
        self.how, self.gate = how, gate
        self.pool = ThreadPoolExecutor(1)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.looping: Thread | None = None
        self.pending: object = None

    @method
    def become(self, how: str, gate: Address | None = None) -> None:
        self.how, self.gate = how, gate

    def write_state(self, directory: str) -> None:
        if self.gate is not None and self.how == "nothing":
            pass_gate(self.gate)
            return  # The folder was removed meanwhile.
        if self.ctx.rank == 0 and self.gate is not None and self.how != "amid":
            pass_gate(self.gate)
        if self.how == "fails" and self.ctx.rank == 1:
            raise OSError("the disk is full")
        with Path(directory, str(self.ctx.rank)).open("w") as file:
            file.write(str(self.count))
            file.flush()
            if self.ctx.rank == 0 and self.gate is not None and self.how == "amid":
                pass_gate(self.gate)

    def save(self, directory: str) -> Any:
        if self.how in ("future", "fails"):
            return self.pool.submit(self.write_state, directory)
        if self.how == "attribute":
            self.pending = self.pool.submit(self.write_state, directory)
            return None
        if self.how == "several":
            return [self.pool.submit(self.write_state, directory), (None, {"one": self.pool.submit(int)}), self.count]
        if self.how == "response":
            return Response(self.pool.submit(int), self.pool.submit(self.write_state, directory))
        if self.how == "coroutine":
            return asyncio.to_thread(self.write_state, directory)
        if self.how == "tasks":
            return self._start_write(directory)
        if self.how == "another loop":
            self.loop = asyncio.new_event_loop()
            self.looping = Thread(target=self.loop.run_forever)
            self.looping.start()
            return asyncio.run_coroutine_threadsafe(self._write_started(directory), self.loop).result()
        if self.how == "process":
            return subprocess.Popen([sys.executable, "-c", f"open('{directory}/{self.ctx.rank}', 'w').write('0')"])
        if self.how == "parts":  # These parts of torch.distributed.checkpoint lack the metadata, which is written last.
            Path(directory, "net").mkdir(exist_ok=True)
            Path(directory, "net", f"__{self.ctx.rank}_0.distcp").write_text("a part")
            return None
        if self.how == "bad process":
            return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        thread = Thread(target=self.write_state, args=(directory,))
        thread.start()
        if self.how == "amid":
            while not Path(directory, str(self.ctx.rank)).exists():
                thread.join(0.001)
        return thread if self.how == "thread" else None

    def close(self) -> None:
        self.pool.shutdown()
        if self.loop is not None and self.looping is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.looping.join()
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    async def _start_write(self, directory: str) -> None:
        self.pending = asyncio.create_task(asyncio.to_thread(self.write_state, directory))

    async def _write_started(self, directory: str) -> asyncio.Task[None]:
        return asyncio.create_task(asyncio.to_thread(self.write_state, directory))


@attrs.frozen
class Response:
    """A response of an asynchronous save, as torch's."""

    staging_completion: Future[Any]
    upload_completion: Future[Any]


class Exporting(Lasting):
    """A role whose `save` and `restore` are role methods of another meaning."""

    @method(dispatch=OnRank(0))
    def save(self, directory: str) -> None:  # pyright: ignore
        """Do nothing."""

    @method
    def restore(self, step: int, directory: str) -> None:  # type: ignore[override]  # pyright: ignore
        """Do nothing."""


class Resizable(Role):
    """A counter that any number of ranks can restore, each to the sum of all counts."""

    def __init__(self) -> None:
        self.count = 0

    @method
    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    def save(self, directory: str) -> None:
        Path(directory, str(self.ctx.rank)).write_text(str(self.count))

    def restore(self, directory: str, ranks: int) -> None:
        self.count = sum(int(Path(directory, str(rank)).read_text()) for rank in range(ranks))


class Distributed(Resizable):
    """A role whose files have the names of torch.distributed.checkpoint."""

    def restore(self, directory: str) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self.count = int(Path(directory, "0").read_text())

    def save(self, directory: str) -> None:
        super().save(directory)
        Path(directory, ".metadata").touch()


class PassingSaver(Role):
    """A counter that can't be saved."""

    def __init__(self) -> None:
        self.count = 0

    @method
    def add(self) -> int:
        self.count += 1
        return self.count


class HalfSaved(PassingSaver):
    """A counter that can be saved but not restored."""

    def save(self, directory: str) -> None:
        """Do nothing."""


class SeededRole(Role):
    """A role that returns the seeds of its calls."""

    @method
    def seed(self, fails: int | None = None) -> int:
        if self.ctx.rank == fails:
            raise ValueError("it has failed before the others have begun")
        return self.ctx.call_seed

    @method(dispatch=PerRank("gate"))
    def wait(self, gate: Any) -> None:
        if gate is not None:
            pass_gate(gate)

    def save(self, directory: str) -> None:
        """Save nothing: there is no other state."""

    def restore(self, directory: str) -> None:
        """Restore nothing: there is no other state."""


class Drawing(Role):
    """A role that draws random numbers. Needs torch."""

    @method
    def draw(self) -> list[int]:
        import torch

        return [int(n) for n in torch.randint(0, 1 << 30, (3,), generator=self.ctx.generator)]

    def save(self, directory: str) -> None:
        """Save nothing: there is no other state."""

    def restore(self, directory: str) -> None:
        """Restore nothing: there is no other state."""

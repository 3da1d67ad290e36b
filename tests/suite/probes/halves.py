"""Roles whose `save` has two halves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

from colocate import method
from colocate.testing.gate import Address, pass_gate
from colocate.testing.probes.lasting import Lasting


class HalfSaver(Lasting):
    """A counter whose `save` takes the count, and writes the file when a gate is open.

    Args:
        gate: The gate before writing; None for no gate.
        how: The kind of fault, or of `save`.
        slow: The rank that waits; None for all ranks.
    """

    def __init__(self, gate: Address | None = None, how: str = "", slow: int | None = None) -> None:
        super().__init__()
        self.gate, self.how, self.slow = gate, how, slow

    @method
    def become(self, how: str = "", gate: Address | None = None, slow: int | None = None) -> None:
        """Change the constructor's settings."""
        self.how, self.gate, self.slow = how, gate, slow

    def save(self, directory: str) -> Any:
        """Save in two halves."""
        if self.how == "nothing to write":
            Path(directory, str(self.ctx.rank)).write_text(str(self.count))
            if self.count:
                return
        count, gate, how = self.count, self.gate, self.how
        if self.slow not in (None, self.ctx.rank):
            gate = None
        yield
        if gate is not None:
            pass_gate(gate)
        if how == "fails" and self.ctx.rank == 1:
            raise OSError("the disk is full")
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(Path(directory, str(self.ctx.rank)).write_text, str(count))
        if how == "all":
            written.result()
            yield
            if self.ctx.rank == 0:
                ranks = range(self.ctx.world_size)
                Path(directory, "all").write_text("".join(Path(directory, str(rank)).read_text() for rank in ranks))
        return written


class LateSaver(Lasting):
    """A counter whose `save` returns before the file is written.

    Args:
        how: The kind of pending write.
        gate: The gate before writing.
    """

    def __init__(self, how: str, gate: Address) -> None:
        super().__init__()
        self.how, self.gate = how, gate
        self.pool = ThreadPoolExecutor(2)

    def write_state(self, directory: str, taken: int) -> None:
        """Write the state behind the gate."""
        pass_gate(self.gate)
        Path(directory, str(self.ctx.rank)).write_text(str(taken))

    def save(self, directory: str) -> Any:
        """Take the state at once, and start the write."""
        if self.how == "thread":
            thread = Thread(target=self.write_state, args=(directory, self.count))
            thread.start()
            return [thread]
        future = self.pool.submit(self.write_state, directory, self.count)
        if self.how == "attribute":
            self.pending = future
            return None
        return future

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()

"""The device of a slot, where it works on its own time: torch's calls return before their work there is done.

A call of a role has ended when its work there has. So an error of the device is that of the call that has caused it,
what a call has kept is complete for whoever uses it, on whatever stream, and how long a call took is how long the
device took. Work that a role begins on other streams than its current one, which may be one of its own, is the role's
to wait for, as ever with torch.

So nothing has to be recorded on streams either: what a call was given, or has been lent, is held until it has ended,
and whoever gets its memory then, on whatever stream, comes after all that was computed with it.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import Any

from colocate._devices.copies import SideStream
from colocate._devices.cuda_driver import beside_captures
from colocate._system.imported import imported
from colocate.gpus import in_use
from colocate.worker.holdings import Storages


class Device:
    """A slot's device, on the lane.

    Attributes:
        is_gpu: Whether it is one; the host works on nobody's own time.
        peaks: What methods have had at most of the device's memory while they ran, beyond what was there when they
            began, in bytes: by role and method. None where nobody knows: on the host, where slots are threads (torch
            has one account for them), and where another allocator is in the place of torch's.
    """

    def __init__(self, name: str, in_process: bool) -> None:
        """Args: name: As torch calls it. in_process: Whether slots are threads."""
        self._name = name
        self.is_gpu = name != "cpu"
        self._starts: list[int] = []  # of memory that isn't the allocator's to give to others
        self._stops: list[int] = []
        self._reserved: object = None
        self._side = SideStream(name)
        self._is_known = True  # whether what runs is all that has taken memory since `begin`
        self._left: list[Any] = []  # streams on which roles may have begun something
        self.peaks: dict[str, int] | None = None if name == "cpu" or in_process else {}

    def leaves(self, stream: Any) -> None:
        """A stream isn't the lane's current one any more: the call's end waits for what its role has begun there."""
        if stream not in self._left:
            self._left.append(stream)

    def begin(self) -> int | None:
        """A call begins: the bytes that torch has allocated on the device; None where nobody knows whose they are."""
        if self.peaks is None or (module := in_use(self._name)) is None:
            return None
        self._is_known = True
        try:
            module.reset_peak_memory_stats(self._name)
            return int(_allocated(module, self._name)["current"])
        except RuntimeError:  # somebody has put an allocator in the place of torch's, which keeps no such books
            self.peaks = None
            return None

    def forget(self) -> None:
        """Amid a call other memory comes: what the call itself has had at most, nobody will know."""
        self._is_known = False

    def end(self, label: str, before: int | None = None) -> None:
        """A method has returned: wait for what it has the device do.

        Args:
            label: The role and method.
            before: What `begin` said when it began; None where something else may have run beside it.

        Raises:
            RuntimeError: The device says that something was wrong with that.
        """
        if not self.is_gpu or (module := in_use(self._name)) is None:
            return
        try:
            self._settle(module)
        except RuntimeError as error:
            error.add_note(
                f"{self._name} told this when what {label} had begun there was waited for. To see which operation it "
                'was, run it once with env={"CUDA_LAUNCH_BLOCKING": "1"} in the pool'
            )
            raise
        if before is not None and self._is_known and self.peaks is not None:
            peak = int(_allocated(module, self._name)["peak"]) - before
            self.peaks[label] = max(self.peaks.get(label, 0), peak)

    def why_lost(self) -> str | None:
        """A call has failed: wait for what it had begun. Why the process can't use the device any more, if it can't."""
        module = in_use(self._name)
        if module is None:
            return None
        said: RuntimeError | None = None
        for _ in range(2):  # what goes wrong in one piece of work is told once; a context that is lost says so for ever
            try:
                self._settle(module)
            except RuntimeError as error:
                said = error
            else:
                return None
        return f"this process can't use {self._name} any more: {said}"

    def _settle(self, module: Any) -> None:
        """Wait for what was begun on the thread's current stream, and on those that were it."""
        while self._left:
            self._left.pop().synchronize()
        module.current_stream(self._name).synchronize()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A block, off the lane, in which what is complete is copied: it doesn't wait for what the lane computes.

        Nor has it to do with what a role captures there.
        """
        module = in_use(self._name)
        if module is None:
            yield
            return
        with beside_captures(self._name), self._side.beside(module):
            yield

    def lends(self, tensor: Any) -> bool:
        """Whether a tensor lies in memory that is written into without torch's noticing: a CUDA graph's.

        Such a graph has a pool of memory to itself, and its outputs are there; a replay changes them. Where torch's
        allocator doesn't tell its pools apart, any tensor may be one of them.
        """
        if tensor.device.type == "cpu":
            return False
        pieces = Storages()  # a sparse or a jagged one has none itself
        pieces.add_tensor(tensor, imported("torch"))
        return any(self.is_private(address) for addresses in pieces.values() for address in addresses)

    def is_private(self, address: int) -> bool:
        """Whether an address of the device is in memory that torch has for somebody alone: a CUDA graph, say."""
        module = in_use(self._name)
        if module is None or not hasattr(module, "memory_snapshot"):
            return False
        self._look(module)
        place = bisect.bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._stops[place]

    def _look(self, module: Any) -> None:
        try:
            # Not the number of segments: those that expand aren't counted.
            reserved = module.memory_stats_as_nested_dict(self._name)["reserved_bytes"]["all"]
            seen = reserved["allocated"], reserved["freed"]
            if seen == self._reserved:  # a look takes as long as a call, or longer
                return
            self._reserved = seen
            found = module.memory_snapshot()
        except RuntimeError:  # by cudaMallocAsync, say, or by no allocator of torch's: any of it may be a graph's
            self._starts, self._stops = [0], [1 << 64]
            return
        private = sorted(
            (each["address"], each["address"] + each["total_size"])
            for each in found
            if tuple(each["segment_pool_id"]) != (0, 0)
        )
        self._starts, self._stops = [start for start, _ in private], [stop for _, stop in private]


def _allocated(module: Any, device: str) -> Any:
    # Not `memory_allocated`, which sorts all that there is to be known into one table first.
    return module.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]

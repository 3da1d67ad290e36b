"""The device of a slot. A GPU works asynchronously: torch's calls return before their work on the GPU is done.

A role's call ends when its work on the device has ended. So a device error belongs to the call that has caused it, a
stored result is complete for every reader on every stream, and a call's duration includes the device's work. If a role
begins work on streams other than its current one, the role itself must wait for that work, as always with torch.

Tensors don't need `record_stream` either. Arguments and borrowed values stay alive until the call has ended, and later
users of the memory, on any stream, come after the call's computation.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import Any

from colocate._devices.copies import SideStream
from colocate._devices.cuda_driver import beside_captures
from colocate._system.imported import find_imported
from colocate.gpus import in_use
from colocate.worker.holdings import Storages


class Device:
    """Waits for a lane's work on the slot's device, and measures the memory that calls use there.

    Attributes:
        is_gpu: Whether the device works asynchronously, unlike the host.
        peaks: Peak bytes of the device's memory per role and method, above the bytes at the method's start. None when
            unknown: on the host, with slots on threads (torch has one account for all), and with another allocator in
            place of torch's.
    """

    def __init__(self, name: str, in_process: bool) -> None:
        """Args: name: The device, in torch's notation. in_process: Whether slots are threads."""
        self._name = name
        self.is_gpu = name != "cpu"
        self._starts: list[int] = []  # Start addresses of segments that the allocator has reserved for private pools.
        self._stops: list[int] = []
        self._reserved: object = None
        self._side = SideStream(name)
        self._is_peak_valid = True  # Whether only the running call has allocated memory since `begin_call`.
        self._former_streams: list[Any] = []  # Streams that were current before, with work of roles.
        self.peaks: dict[str, int] | None = None if name == "cpu" or in_process else {}

    def on_stream_left(self, stream: Any) -> None:
        """Record a stream that is no longer the current one, so that the call's end waits for the stream's work."""
        if stream not in self._former_streams:
            self._former_streams.append(stream)

    def begin_call(self) -> int | None:
        """Reset the peak statistics for a call, and return the bytes that torch has allocated; None if unknown."""
        if self.peaks is None or (module := in_use(self._name)) is None:
            return None
        self._is_peak_valid = True
        try:
            module.reset_peak_memory_stats(self._name)
            return int(_read_allocated(module, self._name)["current"])
        except RuntimeError:  # Another allocator, which lacks these statistics, replaces torch's allocator.
            self.peaks = None
            return None

    def invalidate_peak(self) -> None:
        """Mark the running call's memory peak as unknown, because other code allocates memory meanwhile."""
        self._is_peak_valid = False

    def finish_call(self, label: str, before: int | None = None) -> None:
        """Wait for a method's work on the device.

        Args:
            label: The role and method.
            before: The result of `begin_call`; None if other code may have run concurrently.

        Raises:
            RuntimeError: The work on the device has failed.
        """
        if not self.is_gpu or (module := in_use(self._name)) is None:
            return
        try:
            self._synchronize(module)
        except RuntimeError as error:
            error.add_note(
                f"{self._name} reported this error during the wait for the work of {label}. To find the failing "
                'operation, run once with env={"CUDA_LAUNCH_BLOCKING": "1"} in the pool'
            )
            raise
        if before is not None and self._is_peak_valid and self.peaks is not None:
            peak = int(_read_allocated(module, self._name)["peak"]) - before
            self.peaks[label] = max(self.peaks.get(label, 0), peak)

    def explain_loss(self) -> str | None:
        """Wait for a failed call's work on the device, and check whether the device is lost.

        Return a reason if the process can't use the device any more, otherwise None.
        """
        module = in_use(self._name)
        if module is None:
            return None
        failure: RuntimeError | None = None
        for _ in range(2):  # A failed operation is reported once, but a lost context reports an error every time.
            try:
                self._synchronize(module)
            except RuntimeError as error:
                failure = error
            else:
                return None
        return f"this process can't use {self._name} any more: {failure}"

    def _synchronize(self, module: Any) -> None:
        """Wait for the current stream, and for streams that were current earlier in the call."""
        while self._former_streams:
            self._former_streams.pop().synchronize()
        module.current_stream(self._name).synchronize()

    @contextlib.contextmanager
    def use_side_stream(self) -> Iterator[None]:
        """Run a block on a side stream, so that copies of complete values don't wait for the lane's computation.

        The block must not run on the lane. A role's graph capture on the lane isn't disturbed.
        """
        module = in_use(self._name)
        if module is None:
            yield
            return
        with beside_captures(self._name), self._side.use_unordered(module):
            yield

    def is_volatile(self, tensor: Any) -> bool:
        """Return whether a tensor is in memory that a CUDA graph may overwrite without torch noticing.

        A graph has a private memory pool with its outputs, and a replay overwrites the outputs. If torch's allocator
        doesn't distinguish its pools, any tensor may be an output.
        """
        if tensor.device.type == "cpu":
            return False
        pieces = Storages()  # A sparse or jagged tensor has no storage, only the components have storages.
        pieces.add_tensor(tensor, find_imported("torch"))
        return any(self.is_private(address) for addresses in pieces.values() for address in addresses)

    def is_private(self, address: int) -> bool:
        """Return whether an address is in a private pool of the device's allocator, such as a CUDA graph's."""
        module = in_use(self._name)
        if module is None or not hasattr(module, "memory_snapshot"):
            return False
        self._refresh_pools(module)
        place = bisect.bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._stops[place]

    def _refresh_pools(self, module: Any) -> None:
        try:
            # These byte counters also change when segments expand, unlike the number of segments.
            reserved = module.memory_stats_as_nested_dict(self._name)["reserved_bytes"]["all"]
            counters = reserved["allocated"], reserved["freed"]
            # If the counters are unchanged, skip the memory snapshot, which takes at least as long as a call.
            if counters == self._reserved:
                return
            self._reserved = counters
            segments = module.memory_snapshot()
        except RuntimeError:  # Without snapshots (as with cudaMallocAsync), any memory may be a graph's.
            self._starts, self._stops = [0], [1 << 64]
            return
        private = sorted(
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in segments
            if tuple(segment["segment_pool_id"]) != (0, 0)
        )
        self._starts, self._stops = [start for start, _ in private], [stop for _, stop in private]


def _read_allocated(module: Any, device: str) -> Any:
    # This is quicker than `memory_allocated`, which first sorts all statistics into one table.
    return module.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]

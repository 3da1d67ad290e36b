"""A played GPU: its tensors have contents in this process, and work ends only when it is waited for."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from colocate._definitions import codec
from colocate._devices import copies as device_copies, lending
from colocate._devices.cuda_driver import DriverError
from colocate.worker.residents import store


class Cuda:
    """A stand-in for `torch.cuda` in copies, with its own tensors: work ends when a stream is waited for.

    Attributes:
        copied: The bytes of each copy, in order of their ends.
        fails_at: The copy that fails at its start; None for none.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.copied: list[int] = []
        self.fails_at: int | None = None
        self.pinned = 0
        self._here = threading.local()
        self._usual = Stream(self)
        self._begun = 0
        self._mine: dict[int, Any] = {}
        self.streams = [self._usual]
        patch.setattr(store, "in_use", lambda device: self)  # Slots on the host play one, too.
        for name in ("in_use", "_device_of", "_empty", "_begin"):
            patch.setattr(device_copies, name, getattr(self, name))
        patch.setattr(device_copies, "_rings", {})
        patch.setattr(codec, "_on_device", self.has)

    def ones(self, *shape: int) -> torch.Tensor:
        """Return a tensor of ascending numbers on the device."""
        tensor = self._empty(shape, torch.float32, "cuda:0", False)
        tensor.copy_(torch.arange(float(tensor.numel())).view(shape))
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return tensor.untyped_storage()._cdata in self._mine

    def end(self) -> int:
        """End all work that nobody has waited for, and return how much it was."""
        left = sum(len(stream.queue) for stream in self.streams)
        for stream in self.streams:
            stream.synchronize()
        return left

    # The interface of torch.cuda

    def Stream(self, device: str) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._here, "stream", self._usual)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before

    # Replacements for names of `device_copies`

    def in_use(self, device: str) -> Any:
        return self if device.startswith("cuda") else None

    def _device_of(self, tensor: torch.Tensor) -> str:
        return "cuda:0" if self.has(tensor) else str(tensor.device)

    def _empty(self, shape: Any, dtype: Any, device: Any, pinned: bool) -> torch.Tensor:
        tensor = torch.full(shape, 77, dtype=dtype)
        self.pinned += tensor.nbytes if pinned else 0
        if str(device).startswith("cuda"):
            storage = tensor.untyped_storage()
            self._mine[storage._cdata] = storage  # This keeps the key from other storages.
        return tensor

    def _begin(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._begun += 1
        if self._begun == self.fails_at:
            raise RuntimeError("CUDA error: on purpose")

        def copy() -> None:
            target.copy_(source)
            self.copied.append(target.nbytes)

        self.current_stream().queue.append(copy)


class Stream:
    """A queue of work, which runs when somebody waits."""

    def __init__(self, cuda: Cuda) -> None:
        self.queue: deque[Callable[[], object]] = deque()

    def wait_stream(self, other: Stream) -> None:
        todo = len(other.queue)
        if other is not self and todo:
            last = other.mark()
            self.queue.append(lambda: other.run_to(last))

    def mark(self) -> object:
        """Append a place to the queue."""
        place = _Place()
        self.queue.append(place)
        return place

    def run_to(self, place: object) -> None:
        """Run the work before a place, if the place is still to come."""
        if place in self.queue:
            while (work := self.queue.popleft()) is not place:
                work()

    def synchronize(self) -> None:
        self.run_to(self.mark())


class _Place:
    def __call__(self) -> None:
        """Do nothing."""


class Event:
    """A place in a stream."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._recorded: tuple[Stream, object] | None = None

    def record(self) -> None:
        stream = self._cuda.current_stream()
        self._recorded = stream, stream.mark()

    def synchronize(self) -> None:
        if self._recorded is not None:
            stream, place = self._recorded
            stream.run_to(place)


class PlayedDriver:
    """Plays CUDA's driver where processes lend each other memory of the played device.

    Attributes:
        lends: The reason why it gives no handles; None if it does.
        opens: The reason why it opens no handles; None if it does.
        asked: The number of requests for handles.
        open_now: The addresses that are open.
        amid: A callback after each copy.
    """

    def __init__(self, cuda: Cuda, patch: pytest.MonkeyPatch) -> None:
        self._cuda = cuda
        self.lends: str | None = None
        self.opens: str | None = None
        self.asked = 0
        self.open_now: list[int] = []
        self.amid: Callable[[], object] = lambda: None
        patch.setattr(lending, "get_driver", lambda device: self if device.startswith("cuda") else None)
        patch.setattr(lending, "in_use", cuda.in_use)
        patch.setattr(lending, "empty", lambda shape, dtype, device: cuda._empty(shape, dtype, device, False))

    def create_handle(self, address: int, nbytes: int) -> tuple[bytes, int]:
        self.asked += 1
        if self.lends is not None:
            raise DriverError(self.lends)
        for storage in self._cuda._mine.values():
            offset = address - storage.data_ptr()
            if 0 <= offset <= offset + nbytes <= storage.nbytes():
                return str(storage._cdata).encode(), offset
        raise AssertionError(f"{address} is nowhere on the device")

    def open_handle(self, handle: bytes) -> int:
        if self.opens is not None:
            raise DriverError(self.opens)
        self.open_now.append(self._cuda._mine[int(handle)].data_ptr())
        return self.open_now[-1]

    def copy_memory(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        assert stream is self._cuda.current_stream()
        assert stream is not self._cuda._usual

        def copy() -> None:
            assert self.open_now
            ctypes.memmove(target, source, nbytes)
            self.amid()

        stream.queue.append(copy)

    def close_handle(self, address: int) -> None:
        self.open_now.remove(address)

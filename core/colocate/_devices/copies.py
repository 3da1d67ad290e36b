"""Copies of tensors between the host and a device, for whoever has a value to bring from one to the other.

What lies in memory of the host as it is usual goes through a ring of a few pinned buffers: one is filled, or emptied,
while another one travels. What is sent to another process goes to pinned memory of its own instead: it is read there as
often as somebody wants it, and through a ring it would be copied once more. Both happen beside what is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from colocate.gpus import in_use

if TYPE_CHECKING:
    import torch

WORTH_BYTES = 1 << 16
"""From here on a tensor is worth more than torch's own way."""

_CHUNK_BYTES = 4 << 20  # takes the bus a tenth of a millisecond, and the host some times as long
_CHUNKS = 3

_here = threading.local()  # .copies: those that are shared by what this thread packs


class SideStream:
    """A stream of a device beside those on which is computed; made when it is first needed."""

    def __init__(self, device: str) -> None:
        """Args: device: As torch calls it."""
        self._device = device
        self._stream: Any = None

    @contextlib.contextmanager
    def beside(self, module: Any) -> Iterator[None]:
        """A block on it, which waits for nothing: what is copied there is complete."""
        with module.stream(self._made(module)):
            yield

    @contextlib.contextmanager
    def amid(self, module: Any) -> Iterator[Any]:
        """A block on it, which is given it: the thread's own stream comes first, and then goes on after it.

        So memory that the thread's stream has taken may be written to, and let go of by the thread afterwards.
        """
        stream, current = self._made(module), module.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with module.stream(stream):
                yield stream
        finally:
            current.wait_stream(stream)

    @contextlib.contextmanager
    def after(self, module: Any) -> Iterator[None]:
        """A block on it, which is done at its end: the thread's own stream comes first.

        That doesn't wait, as the thread does: other threads may have the same one, and compute there meanwhile.
        """
        stream = self._made(module)
        stream.wait_stream(module.current_stream(self._device))
        try:
            with module.stream(stream):
                yield
        finally:
            stream.synchronize()

    def _made(self, module: Any) -> Any:
        if self._stream is None:
            self._stream = module.Stream(self._device)
        return self._stream


@attrs.define(eq=False)
class _Chunk:
    """A pinned buffer, and an event: it has travelled."""

    memory: Any
    event: Any


class Ring:
    """A device's pinned buffers, through which memory of the host that isn't pinned is copied."""

    def __init__(self, device: str, chunk_bytes: int = _CHUNK_BYTES, chunks: int = _CHUNKS) -> None:
        """Args: device: As torch calls it. chunk_bytes: How large a buffer is. chunks: How many there are."""
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._count = chunks
        self._side = SideStream(device)
        self._lock = threading.Lock()  # one copy at a time
        self._chunks: deque[_Chunk] = deque()  # the one that travels longest first

    def upload(self, source: Any, target: Any) -> None:
        """Copy bytes of the host to the device; the last of them are on their way when this returns (`wait`)."""
        with self._copying() as module:
            for start in range(0, len(source), self._chunk_bytes):
                part = source[start : start + self._chunk_bytes]
                chunk = self._next(module)
                held = chunk.memory[: len(part)]
                held.copy_(part)
                _begin(target[start : start + len(part)], held)
                chunk.event.record()

    def download(self, source: Any, target: Any) -> None:
        """Copy bytes of the device to the host; they are there when this returns."""
        with self._copying() as module:
            travel: deque[tuple[_Chunk, Any]] = deque()
            for start in range(0, len(source), self._chunk_bytes):
                if len(travel) == self._count:
                    _land(*travel.popleft())
                part = source[start : start + self._chunk_bytes]
                chunk = self._next(module)
                _begin(chunk.memory[: len(part)], part)
                chunk.event.record()
                travel.append((chunk, target[start : start + len(part)]))
            for each in travel:
                _land(*each)

    def wait(self) -> None:
        """Until what was uploaded is there, whatever stream uses it."""
        with self._lock:
            events = [chunk.event for chunk in self._chunks]
        for event in events:
            event.synchronize()

    @contextlib.contextmanager
    def _copying(self) -> Iterator[Any]:
        module = in_use(self._device)
        with self._lock, self._side.amid(module) as stream:
            try:
                yield module
            except BaseException:
                stream.synchronize()  # nothing is on its way to or from what the caller lets go of
                raise

    def _next(self, module: Any) -> _Chunk:
        """The buffer that is free first, when it is."""
        if not self._chunks:
            uint8 = sys.modules["torch"].uint8
            self._chunks.extend(
                [_Chunk(_empty((self._chunk_bytes,), uint8, "cpu", True), module.Event()) for _ in range(self._count)]
            )
        chunk = self._chunks[0]
        self._chunks.rotate(-1)
        chunk.event.synchronize()
        return chunk


def _land(chunk: _Chunk, target: Any) -> None:
    chunk.event.synchronize()
    target.copy_(chunk.memory[: len(target)])


_rings: dict[str, Ring] = {}  # of devices: all who copy in this process share them
_rings_lock = threading.Lock()


class Copies:
    """Copies of tensors on one device, all of which are complete when `wait` has returned."""

    __slots__ = ("_uploads", "device")

    def __init__(self, device: str | torch.device) -> None:
        """Args: device: Where they are to be."""
        self.device = device
        self._uploads: Ring | None = None

    def of(self, tensor: Any) -> Any:
        """A copy of a tensor, or the very tensor where it is there; see `wait`."""
        if not is_plain(tensor) or tensor.nbytes < WORTH_BYTES:
            line = line_of(tensor)
            return tensor.to(self.device) if line is None else self.of(line).as_strided(tensor.shape, tensor.stride())
        here, there = _device_of(tensor), str(self.device)
        if (here == "cpu") is (there == "cpu") or in_use(there if here == "cpu" else here) is None:
            return tensor.to(self.device)
        device = there if here == "cpu" else here
        with _rings_lock:
            ring = _rings.get(device) or _rings.setdefault(device, Ring(device))
        copy = _empty(tensor.shape, tensor.dtype, self.device, False)
        try:
            if here == "cpu":
                self._uploads = ring
                ring.upload(flat(tensor), flat(copy))
            else:
                ring.download(flat(tensor), flat(copy))
        except _NoMemoryError:
            return tensor.to(self.device)
        return copy

    def wait(self) -> None:
        """Until all are complete, whatever stream uses them."""
        if self._uploads is not None:
            self._uploads.wait()


def to_host(tensor: Any) -> Any:
    """A device's tensor in memory of the host's from which it can be sent.

    It is copied on the thread's current stream, when what makes it there is done.
    """
    module = in_use(_device_of(tensor))
    if module is None or not is_plain(tensor) or tensor.nbytes < WORTH_BYTES:
        return tensor.cpu()
    try:
        # Torch keeps such memory for the next one; a copy to any other goes through some of the driver's own.
        host = _empty(tensor.shape, tensor.dtype, "cpu", True)
    except _NoMemoryError:
        return tensor.cpu()
    _begin(host, tensor)
    module.current_stream(tensor.device).synchronize()
    return host


def line_of(tensor: Any) -> Any:
    """Return what lies in memory of a tensor with more items than that, as an expanded one; None of others."""
    torch = sys.modules["torch"]
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if tensor.is_contiguous() or not tensor.numel():
        return None
    items = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((items,), (1,)) if items < tensor.numel() else None


def flat(tensor: Any) -> Any:
    """The bytes of a contiguous tensor, as a tensor of one dimension."""
    # Not reshape(-1): a dimension of size one may have any stride in a contiguous tensor, and would keep it.
    line = tensor if tensor.stride() == (1,) else tensor.as_strided((tensor.numel(),), (1,))
    return line.view(sys.modules["torch"].uint8)


def exposed(line: Any) -> Any:
    """Such bytes of the host's as a buffer.

    Not as an array: once there was one, torch takes the memory for another library's, and never resizes it again.
    """
    memory: Any = (ctypes.c_ubyte * line.numel()).from_address(line.data_ptr())
    memory.tensor = line  # it has to be there as long
    return memory


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is its bytes, one after the other."""
    torch = sys.modules["torch"]
    return bool(
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


@attrs.define(eq=False)
class _Copy:
    """Bytes of a storage, from one to before another.

    Attributes:
        host: They, on the host; None before they are there.
        lock: Who has it copies them.
    """

    storage: int
    start: int
    stop: int
    host: Any = None
    lock: threading.Lock = attrs.field(factory=threading.Lock)


class HostCopies:
    """Copies of one value's tensors. They are complete on their device and don't change.

    Who wants what another one is about to copy waits for that. Of what lies in a copy no other one is made.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        """Args: tensors: Those of the value, which is there as long as this is."""
        self._lock = threading.Lock()
        self._copies: list[_Copy] = []
        # What has another storage, some rows that had to be gathered, say, may be gone tomorrow, and its name reused.
        self._storages = {tensor.untyped_storage()._cdata for tensor in tensors}

    @property
    def nbytes(self) -> int:
        """How many bytes they are."""
        return sum(host.nbytes for host in self.tensors())

    def tensors(self) -> list[Any]:
        """Return what there is on the host, as bytes."""
        return [copy.host for copy in list(self._copies) if copy.host is not None]

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A block in which this thread packs the value, or some of it."""
        outer = getattr(_here, "copies", None)
        _here.copies = self
        try:
            yield
        finally:
            _here.copies = outer

    def of(self, tensor: Any) -> Any:
        """A tensor of the value, or of some of its rows, on the host."""
        if not is_plain(tensor) or tensor.nbytes < WORTH_BYTES:
            return to_host(tensor)
        storage = tensor.untyped_storage()._cdata
        if storage not in self._storages:
            return to_host(tensor)
        start = tensor.storage_offset() * tensor.itemsize
        stop = start + tensor.nbytes
        with self._lock:
            for copy in self._copies:
                covers = copy.storage == storage and copy.start <= start and stop <= copy.stop
                if covers and (start - copy.start) % tensor.itemsize == 0:
                    break
            else:
                copy = _Copy(storage, start, stop)
                self._copies.append(copy)
        with copy.lock:
            if copy.host is None:
                copy.host = to_host(flat(tensor))
        memory = copy.host[start - copy.start :][: tensor.nbytes]
        return memory.view(tensor.dtype).view(tensor.shape)


def on_host(tensor: Any) -> Any:
    """A device's tensor on the host, to be sent; see `HostCopies.shared`."""
    copies: HostCopies | None = getattr(_here, "copies", None)
    return to_host(tensor) if copies is None else copies.of(tensor)


class _NoMemoryError(RuntimeError):
    """There is no more pinned memory."""


# What a test plays.


def _device_of(tensor: Any) -> str:
    return str(tensor.device)


def _empty(shape: Any, dtype: Any, device: Any, pinned: bool) -> Any:
    torch = sys.modules["torch"]
    if not pinned:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=True)
    except RuntimeError as error:
        raise _NoMemoryError(str(error)) from error


def _begin(target: Any, source: Any) -> None:
    """Have a copy done on the current stream, one end of which is pinned."""
    target.copy_(source, non_blocking=True)

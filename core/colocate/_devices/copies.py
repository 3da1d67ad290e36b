"""Copy tensors between the host and a device.

Pageable host memory is copied through a ring of a few pinned buffers: one is filled or emptied while another is in
transfer. Data for another process goes to separate pinned memory: the peer reads it there repeatedly, and a ring would
cost one more copy. Both run beside computation.
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
"""Size in bytes above which these copies are faster than torch's."""

_CHUNK_BYTES = 4 << 20  # Copying a buffer takes 0.1 ms on the bus, and several times as long on the host.
_CHUNKS = 3

_here = threading.local()  # The attribute `copies` has the `HostCopies` for all values that this thread packs.


class SideStream:
    """A stream of a device for copies beside the computation, created on first use."""

    def __init__(self, device: str) -> None:
        """Prepare a side stream, which is created on first use.

        Args:
            device: The device, as torch names it.
        """
        self._device = device
        self._stream: Any = None

    @contextlib.contextmanager
    def use_unordered(self, module: Any) -> Iterator[None]:
        """Run a block on the side stream without waiting for other streams.

        The copied data must be complete already.
        """
        with module.stream(self._get_stream(module)):
            yield

    @contextlib.contextmanager
    def use_ordered(self, module: Any) -> Iterator[Any]:
        """Run a block on the side stream, after the current stream's work; the current stream then waits for the block.

        So memory allocated on the current stream may be written in the block, and freed afterwards.
        """
        stream, current = self._get_stream(module), module.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with module.stream(stream):
                yield stream
        finally:
            current.wait_stream(stream)

    @contextlib.contextmanager
    def use_synchronized(self, module: Any) -> Iterator[None]:
        """Run a block on the side stream, after the current stream's work, and synchronize at the end.

        Only the side stream is synchronized: other threads may share the current stream, and continue to compute.
        """
        stream = self._get_stream(module)
        stream.wait_stream(module.current_stream(self._device))
        try:
            with module.stream(stream):
                yield
        finally:
            stream.synchronize()

    def _get_stream(self, module: Any) -> Any:
        if self._stream is None:
            self._stream = module.Stream(self._device)
        return self._stream


@attrs.define(eq=False)
class _Chunk:
    """A pinned buffer, with an event recorded after its last transfer."""

    memory: Any
    event: Any


class Ring:
    """The pinned buffers of a device, for copies of pageable host memory."""

    def __init__(self, device: str, chunk_bytes: int = _CHUNK_BYTES, chunks: int = _CHUNKS) -> None:
        """Prepare a ring of buffers, which are allocated on first use.

        Args:
            device: The device, as torch names it.
            chunk_bytes: Size of a buffer.
            chunks: Number of buffers.
        """
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._count = chunks
        self._side = SideStream(device)
        self._lock = threading.Lock()  # Only one thread copies at a time.
        self._chunks: deque[_Chunk] = deque()  # The buffer with the oldest transfer comes first.

    def upload(self, source: Any, target: Any) -> None:
        """Copy host bytes to the device. The last transfers may still be running on return (see `wait_for_uploads`)."""
        with self._copying() as module:
            for start in range(0, len(source), self._chunk_bytes):
                part = source[start : start + self._chunk_bytes]
                chunk = self._next_chunk(module)
                held = chunk.memory[: len(part)]
                held.copy_(part)
                _begin(target[start : start + len(part)], held)
                chunk.event.record()

    def download(self, source: Any, target: Any) -> None:
        """Copy device bytes to the host. All transfers are complete on return."""
        with self._copying() as module:
            travel: deque[tuple[_Chunk, Any]] = deque()
            for start in range(0, len(source), self._chunk_bytes):
                if len(travel) == self._count:
                    _finish_download(*travel.popleft())
                part = source[start : start + self._chunk_bytes]
                chunk = self._next_chunk(module)
                _begin(chunk.memory[: len(part)], part)
                chunk.event.record()
                travel.append((chunk, target[start : start + len(part)]))
            for pair in travel:
                _finish_download(*pair)

    def wait_for_uploads(self) -> None:
        """Wait until all uploads are complete, so that any stream can use the data."""
        with self._lock:
            events = [chunk.event for chunk in self._chunks]
        for event in events:
            event.synchronize()

    @contextlib.contextmanager
    def _copying(self) -> Iterator[Any]:
        module = in_use(self._device)
        with self._lock, self._side.use_ordered(module) as stream:
            try:
                yield module
            except BaseException:
                stream.synchronize()  # No transfer may use memory that the caller is about to free.
                raise

    def _next_chunk(self, module: Any) -> _Chunk:
        """Wait for the oldest buffer's transfer, and return that buffer."""
        if not self._chunks:
            uint8 = sys.modules["torch"].uint8
            self._chunks.extend(
                [_Chunk(_empty((self._chunk_bytes,), uint8, "cpu", True), module.Event()) for _ in range(self._count)]
            )
        chunk = self._chunks[0]
        self._chunks.rotate(-1)
        chunk.event.synchronize()
        return chunk


def _finish_download(chunk: _Chunk, target: Any) -> None:
    chunk.event.synchronize()
    target.copy_(chunk.memory[: len(target)])


_rings: dict[str, Ring] = {}  # Maps each device to a ring, which all copies in this process share.
_rings_lock = threading.Lock()


class Copies:
    """Copies tensors to one device. All copies are complete after `wait_for_copies`."""

    __slots__ = ("_uploads", "device")

    def __init__(self, device: str | torch.device) -> None:
        """Prepare to copy tensors to a device.

        Args:
            device: The target device.
        """
        self.device = device
        self._uploads: Ring | None = None

    def copy_tensor(self, tensor: Any) -> Any:
        """Return a copy of a tensor on the device, or the tensor if already there; see `wait_for_copies`."""
        if not is_plain_tensor(tensor) or tensor.nbytes < WORTH_BYTES:
            line = find_line(tensor)
            return (
                tensor.to(self.device)
                if line is None
                else self.copy_tensor(line).as_strided(tensor.shape, tensor.stride())
            )
        source_device, target_device = _device_of(tensor), str(self.device)
        if (source_device == "cpu") is (target_device == "cpu") or in_use(
            target_device if source_device == "cpu" else source_device
        ) is None:
            return tensor.to(self.device)
        device = target_device if source_device == "cpu" else source_device
        with _rings_lock:
            ring = _rings.get(device) or _rings.setdefault(device, Ring(device))
        copy = _empty(tensor.shape, tensor.dtype, self.device, False)
        try:
            if source_device == "cpu":
                self._uploads = ring
                ring.upload(view_bytes(tensor), view_bytes(copy))
            else:
                ring.download(view_bytes(tensor), view_bytes(copy))
        except _NoMemoryError:
            return tensor.to(self.device)
        return copy

    def wait_for_copies(self) -> None:
        """Wait until all copies are complete, so that any stream can use the copies."""
        if self._uploads is not None:
            self._uploads.wait_for_uploads()


def copy_to_host(tensor: Any) -> Any:
    """Copy a device's tensor to host memory for sending.

    The copy runs on the thread's current stream, after the work that computes the tensor.
    """
    module = in_use(_device_of(tensor))
    if module is None or not is_plain_tensor(tensor) or tensor.nbytes < WORTH_BYTES:
        return tensor.cpu()
    try:
        # The target is pinned memory, which torch's allocator reuses.
        # A copy to pageable memory would pass through a buffer of the CUDA driver.
        host = _empty(tensor.shape, tensor.dtype, "cpu", True)
    except _NoMemoryError:
        return tensor.cpu()
    _begin(host, tensor)
    module.current_stream(tensor.device).synchronize()
    return host


def find_line(tensor: Any) -> Any:
    """Return a tensor's distinct items if the tensor repeats items (such as an expanded tensor); otherwise None."""
    torch = sys.modules["torch"]
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if tensor.is_contiguous() or not tensor.numel():
        return None
    items = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((items,), (1,)) if items < tensor.numel() else None


def view_bytes(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor, as a one-dimensional tensor."""
    # `reshape(-1)` would keep the stride, but a dimension of size one may have any stride in a contiguous tensor.
    line = tensor if tensor.stride() == (1,) else tensor.as_strided((tensor.numel(),), (1,))
    return line.view(sys.modules["torch"].uint8)


def expose_buffer(line: Any) -> Any:
    """Return a buffer object that shares the memory of a tensor of host bytes.

    Not as a NumPy array: afterwards torch would treat the memory as foreign, and never resize it again.
    """
    memory: Any = (ctypes.c_ubyte * line.numel()).from_address(line.data_ptr())
    memory.tensor = line  # This reference keeps the tensor's memory alive.
    return memory


def is_plain_tensor(tensor: Any) -> bool:
    """Return whether a tensor's value is just its contiguous bytes."""
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
    """A range of bytes of a storage, with a copy on the host.

    Attributes:
        host: The bytes on the host; None until copied.
        lock: Held by the thread that copies.
    """

    storage: int
    start: int
    stop: int
    host: Any = None
    lock: threading.Lock = attrs.field(factory=threading.Lock)


class HostCopies:
    """Host copies of the tensors of one value. On the device, the tensors are complete and don't change.

    Threads that need the same bytes share one copy. Parts of copied ranges are not copied again.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        """Prepare host copies, which are made on demand.

        Args:
            tensors: The tensors of the value, which outlives this object.
        """
        self._lock = threading.Lock()
        self._copies: list[_Copy] = []
        # A tensor with another storage, such as gathered rows, may be freed soon, and the storage's address reused.
        self._storages = {tensor.untyped_storage()._cdata for tensor in tensors}

    @property
    def nbytes(self) -> int:
        return sum(host.nbytes for host in self.list_copies())

    def list_copies(self) -> list[Any]:
        """Return all copies on the host, as bytes."""
        return [copy.host for copy in list(self._copies) if copy.host is not None]

    @contextlib.contextmanager
    def share_with_thread(self) -> Iterator[None]:
        """Use these copies for tensors that this thread packs during a block."""
        outer = getattr(_here, "copies", None)
        _here.copies = self
        try:
            yield
        finally:
            _here.copies = outer

    def get_copy(self, tensor: Any) -> Any:
        """Return a host copy of a tensor of the value, or of some rows of such a tensor."""
        if not is_plain_tensor(tensor) or tensor.nbytes < WORTH_BYTES:
            return copy_to_host(tensor)
        storage = tensor.untyped_storage()._cdata
        if storage not in self._storages:
            return copy_to_host(tensor)
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
                copy.host = copy_to_host(view_bytes(tensor))
        memory = copy.host[start - copy.start :][: tensor.nbytes]
        return memory.view(tensor.dtype).view(tensor.shape)


def get_host_copy(tensor: Any) -> Any:
    """Return a host copy of a device's tensor for sending.

    Inside `HostCopies.share_with_thread`, threads share the copies.
    """
    copies: HostCopies | None = getattr(_here, "copies", None)
    return copy_to_host(tensor) if copies is None else copies.get_copy(tensor)


class _NoMemoryError(RuntimeError):
    """Raised if no pinned memory is left."""


# Tests replace this function, and the functions below.
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
    target.copy_(source, non_blocking=True)

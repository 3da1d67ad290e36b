"""Use functions of the CUDA driver that torch lacks.

The driver lends device memory to other processes, pins host memory, and allows work on other threads during a graph
capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

from colocate.gpus import number_of

HANDLE_BYTES = 64  # This is the driver's constant CU_IPC_HANDLE_SIZE.
_ENABLE_PEER_ACCESS = 1  # This is the driver's constant CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.
_PORTABLE = 1  # This is the driver's constant CU_MEMHOSTREGISTER_PORTABLE.
_EXCHANGE = "cuThreadExchangeStreamCaptureMode"
_THREAD_LOCAL = 1  # This is the driver's constant CU_STREAM_CAPTURE_MODE_THREAD_LOCAL.


class DriverError(RuntimeError):
    """Raised if the driver refuses a call."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class Driver:
    """Calls the CUDA driver for one device of this process.

    A handle refers to a whole allocation of the driver, which an allocator may have divided; so an offset goes with the
    handle. The other process needn't see the device, but its own device must reach it.
    """

    def __init__(self, library: Any, device: str) -> None:
        """Wrap the driver's library.

        Args:
            library: The library in ctypes.
            device: The device, as torch names it; see `_context`.
        """
        self._library = library
        self._device = device
        self._primary: ctypes.c_void_p | None = None

    def create_handle(self, address: int, nbytes: int) -> tuple[bytes, int]:
        """Return a handle that another process can open for this memory, and the memory's offset in the allocation."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self._context():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
            offset = address - base.value
            if offset + nbytes > size.value:
                raise DriverError("memory that consists of several pieces")
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.reserved), offset

    def open_handle(self, handle: bytes) -> int:
        """Map memory of another process, and return the address here."""
        address = ctypes.c_uint64()
        raw_handle = _Handle.from_buffer_copy(handle)
        with self._context():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), raw_handle, ctypes.c_uint(_ENABLE_PEER_ACCESS))
        return address.value

    def copy_memory(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Start an asynchronous copy of device memory on a stream."""
        size, where = ctypes.c_size_t(nbytes), ctypes.c_void_p(stream.cuda_stream)
        with self._context():
            self._call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), size, where)

    def close_handle(self, address: int) -> None:
        with self._context():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def pin(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that the device can copy directly."""
        size = ctypes.c_size_t(nbytes)
        with self._context():
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), size, ctypes.c_uint(_PORTABLE))

    def unpin(self, address: int) -> None:
        with self._context():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        mode = ctypes.c_int(_THREAD_LOCAL)
        try:
            with self._context():
                self._call(_EXCHANGE, ctypes.byref(mode))  # This call stores the previous mode in `mode`.
            yield
        finally:
            if mode.value != _THREAD_LOCAL:
                with contextlib.suppress(DriverError), self._context():
                    self._call(_EXCHANGE, ctypes.byref(mode))

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """Make the device's primary context current during a block. Torch has created the context by now.

        Threads begin without a context, and a thread that frees memory may use another device's context.
        """
        if self._primary is None:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(number_of(self._device)))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)  # Torch uses this context, too.
            self._primary = context
        self._call("cuCtxPushCurrent_v2", self._primary)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"{name}: this driver lacks it")
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'error %d' % code).decode(errors='replace')}")


@functools.cache
def get_driver(device: str, load: Callable[[str], Any] = ctypes.CDLL) -> Driver | None:
    """Return the CUDA driver for a device, even if the device is unused so far; None if there is no driver.

    AMD's and Intel's GPUs have other drivers.
    """
    if not device.startswith("cuda"):
        return None
    try:
        return Driver(load("libcuda.so.1"), device)
    except OSError:
        return None


@contextlib.contextmanager
def beside_captures(device: str) -> Iterator[None]:
    """Use a device during a block while other threads may capture graphs on that device.

    A capture in torch's default mode concerns all threads: calls that the driver deems unsafe, such as querying an
    event, fail on any thread, and break the capture. A thread may opt out.
    """
    device_driver = get_driver(device)
    with contextlib.ExitStack() as stack:
        if device_driver is not None:
            with contextlib.suppress(DriverError):  # An older driver may lack this function.
                stack.enter_context(device_driver.beside_captures())
        yield

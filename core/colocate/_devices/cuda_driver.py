"""What CUDA's driver does beyond torch.

It lends memory of a device to another process, pins memory of the host, and lets threads work while another one
captures a graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

from colocate.gpus import number_of

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_EXCHANGE = "cuThreadExchangeStreamCaptureMode"
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class DriverError(RuntimeError):
    """The driver refuses."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class Driver:
    """The library, for one device of this process.

    A handle is of a piece of memory as the driver has it, of which an allocator may have made many; so an offset goes
    with it. The other process needn't see the device, but its own has to reach it.
    """

    def __init__(self, library: Any, device: str) -> None:
        """Args: library: As ctypes has it. device: As torch calls it; see `_context`."""
        self._library = library
        self._device = device
        self._primary: ctypes.c_void_p | None = None

    def handle(self, address: int, nbytes: int) -> tuple[bytes, int]:
        """Return what another process opens to get at some memory, and where in that it begins."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self._context():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
            offset = address - base.value
            if offset + nbytes > size.value:
                raise DriverError("memory that consists of several pieces")
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.reserved), offset

    def open(self, handle: bytes) -> int:
        """The address at which memory of another process is from now on."""
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        with self._context():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_ENABLE_PEER_ACCESS))
        return address.value

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Begin to copy memory of devices."""
        size, where = ctypes.c_size_t(nbytes), ctypes.c_void_p(stream.cuda_stream)
        with self._context():
            self._call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), size, where)

    def close(self, address: int) -> None:
        """Let go of what was opened."""
        with self._context():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def pin(self, address: int, nbytes: int) -> None:
        """Have some memory of the host's stay where it is: the device copies from and to it by itself."""
        size = ctypes.c_size_t(nbytes)
        with self._context():
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), size, ctypes.c_uint(_PORTABLE))

    def unpin(self, address: int) -> None:
        """Have it be as others."""
        with self._context():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        """See `beside_captures`."""
        mode = ctypes.c_int(_THREAD_LOCAL)
        try:
            with self._context():
                self._call(_EXCHANGE, ctypes.byref(mode))  # which says how it was
            yield
        finally:
            if mode.value != _THREAD_LOCAL:
                with contextlib.suppress(DriverError), self._context():
                    self._call(_EXCHANGE, ctypes.byref(mode))

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """A block in the device's context, which torch has made by now: some tensor is there, or is to be.

        Threads begin without one, and this may be the thread of another device, which frees something.
        """
        if self._primary is None:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(number_of(self._device)))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)  # torch's own
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
def driver(device: str, load: Callable[[str], Any] = ctypes.CDLL) -> Driver | None:
    """The driver for a device of this process, which needn't be in use yet; None where there is none.

    AMD's and Intel's GPUs have others.
    """
    if not device.startswith("cuda"):
        return None
    try:
        return Driver(load("libcuda.so.1"), device)
    except OSError:
        return None


@contextlib.contextmanager
def beside_captures(device: str) -> Iterator[None]:
    """A block in which a thread uses a device, whatever graphs others capture there.

    A capture in torch's default mode is for all threads: what the driver calls unsafe, as to ask an event whether it is
    over, fails on any of them meanwhile, and ends the capture. A thread may say that it takes no part.
    """
    found = driver(device)
    with contextlib.ExitStack() as stack:
        if found is not None:
            with contextlib.suppress(DriverError):  # an older one: then it is as it was
                stack.enter_context(found.beside_captures())
        yield

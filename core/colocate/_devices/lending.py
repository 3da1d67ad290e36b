"""Lend a device's memory to processes of one machine: the receiver copies directly from the owner's memory.

The owner sends handles instead of bytes, and keeps the memory while the receiver's call is unfinished. After the copy
the receiver asks whether the memory was still kept; without a confirmation the copy is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from colocate._devices.copies import SideStream, is_plain_tensor
from colocate._devices.cuda_driver import Driver, DriverError, get_driver
from colocate._system.imported import find_imported
from colocate.gpus import in_use

WORTH_LENDING_BYTES = 1 << 20
"""Size in bytes above which a handle pays off; opening one takes some tenths of a millisecond."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
# The attribute `lender` is for values that this thread packs, and `borrower` for values that it unpacks.
_here = threading.local()


class NotLentError(Exception):
    """Raised if a handle can't be opened."""


def get_place(device: str) -> str:
    """Return a text that is equal in processes that can lend each other memory; "" if lending isn't possible.

    The device may be unused so far, because a received value may be its first use.
    """
    torch = find_imported("torch")
    if torch is None or get_driver(device) is None:
        return ""
    return f"{_get_machine_id()} {device.partition(':')[0]} torch {torch.__version__}"


@functools.cache
def _get_machine_id() -> str:
    return _BOOT.read_text().strip()


class Lender:
    """Creates handles for the tensors of one value.

    Attributes:
        lent: Bytes lent so far.
        refusal: The driver's error, if any; later tensors are then sent through the host.
    """

    def __init__(self, device: str, tensors: Iterable[Any]) -> None:
        """Prepare to lend the memory of one value's tensors.

        Args:
            device: The device of the tensors.
            tensors: Tensors that live as long as the value.
        """
        self.lent = 0
        self.refusal = ""
        self._driver = get_driver(device)
        self._storages = {tensor.untyped_storage()._cdata for tensor in tensors}

    @contextlib.contextmanager
    def lend_block(self) -> Iterator[None]:
        """Lend tensors that this thread packs during a block."""
        _here.lender = self
        try:
            yield
        finally:
            _here.lender = None

    def create_handle(self, tensor: Any) -> tuple[Any, ...] | None:
        """Return a pickle reduction with a handle of the tensor's memory; None if the tensor's bytes must be sent."""
        if self._driver is None or self.refusal or tensor.nbytes < WORTH_LENDING_BYTES or not is_plain_tensor(tensor):
            return None
        # For example, gathered rows are in memory that isn't part of the value.
        if tensor.untyped_storage()._cdata not in self._storages:
            return None
        try:
            handle, offset = self._driver.create_handle(tensor.data_ptr(), tensor.nbytes)
        except DriverError as error:
            self.refusal = str(error)
            return None
        self.lent += tensor.nbytes
        return copy_borrowed, (handle, offset, str(tensor.dtype)[6:], tuple(tensor.shape))


def get_handle(tensor: Any) -> tuple[Any, ...] | None:
    """Return a device tensor's pickle reduction with a memory handle if this thread lends memory; otherwise None."""
    lender: Lender | None = getattr(_here, "lender", None)
    return None if lender is None else lender.create_handle(tensor)


class Borrower:
    """Copies memory that other processes lend."""

    def __init__(self, device: str) -> None:
        """Prepare to copy lent memory to a device.

        Args:
            device: The device for the copies.
        """
        self._device = device
        self._side = SideStream(device)

    @contextlib.contextmanager
    def borrow_block(self) -> Iterator[None]:
        """Copy lent tensors that this thread unpacks during a block. All copies are complete at the block's end."""
        device_driver = get_driver(self._device)
        assert device_driver is not None
        _here.borrower = loan = _Loan(device_driver, self._device, self._side)
        try:
            yield
        finally:
            _here.borrower = None
            loan.end_loan()


class _Loan:
    """The memory handles that are open while one value is unpacked."""

    def __init__(self, found: Driver, device: str, side: SideStream) -> None:
        self._driver = found
        self._device = device
        self._side = side
        self._open: dict[bytes, int] = {}
        self._stream: Any = None

    def copy_tensor(self, handle: bytes, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        torch = sys.modules["torch"]
        tensor = empty(shape, getattr(torch, dtype), self._device)
        try:
            if handle not in self._open:
                self._open[handle] = self._driver.open_handle(handle)
            with self._side.use_ordered(in_use(self._device)) as self._stream:
                self._driver.copy_memory(tensor.data_ptr(), self._open[handle] + offset, tensor.nbytes, self._stream)
        except DriverError as error:
            raise NotLentError(str(error)) from error
        return tensor

    def end_loan(self) -> None:
        try:
            if self._stream is not None:
                self._stream.synchronize()
        except RuntimeError as error:
            error.add_note(f"{self._device} told this when memory that another worker lends was copied there")
            raise
        finally:
            for address in self._open.values():
                # If the CUDA context is lost, that was reported before, and no handle is open any more.
                with contextlib.suppress(DriverError):
                    self._driver.close_handle(address)


def copy_borrowed(handle: bytes, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a copy of a lent tensor."""
    loan: _Loan = _here.borrower
    return loan.copy_tensor(handle, offset, dtype, shape)


def empty(shape: tuple[int, ...], dtype: Any, device: str) -> Any:
    """Allocate a tensor for a copy. Replaced by tests."""
    return sys.modules["torch"].empty(shape, dtype=dtype, device=device)

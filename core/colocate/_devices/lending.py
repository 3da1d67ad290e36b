"""A device's memory on its way between processes of one machine: the receiver copies it from where it lies.

The owner gives handles in place of bytes. It keeps what it lends for as long as the receiver's call is unfinished,
which is why it has it at all; when the receiver has a copy it asks whether that was so. Without an answer it has none.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from colocate._devices.copies import SideStream, is_plain
from colocate._devices.cuda_driver import Driver, DriverError, driver
from colocate._system.imported import imported
from colocate.gpus import in_use

WORTH_LENDING_BYTES = 1 << 20
"""From here on a tensor is worth a handle, which takes some tenths of a millisecond to open."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_here = threading.local()  # .lender: of what this thread packs; .borrower: of what it unpacks


class NotLentError(Exception):
    """A handle can't be opened."""


def place(device: str) -> str:
    """Where a process computes, as those say it alike which may lend memory to each other; "" where none may.

    It needn't have used the device yet: what comes first may be a value for it.
    """
    torch = imported("torch")
    if torch is None or driver(device) is None:
        return ""
    return f"{_machine()} {device.partition(':')[0]} torch {torch.__version__}"


@functools.cache
def _machine() -> str:
    return _BOOT.read_text().strip()


class Lender:
    """Gives handles for the tensors of one value.

    Attributes:
        lent: How many bytes.
        refusal: Why the driver gives none, if it doesn't: what then remains goes by the host.
    """

    def __init__(self, device: str, tensors: Iterable[Any]) -> None:
        """Args: device: Where they are. tensors: Those that stay as long as the value."""
        self.lent = 0
        self.refusal = ""
        self._driver = driver(device)
        self._storages = {tensor.untyped_storage()._cdata for tensor in tensors}

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """A block in which this thread packs the value, or some of it."""
        _here.lender = self
        try:
            yield
        finally:
            _here.lender = None

    def handle(self, tensor: Any) -> tuple[Any, ...] | None:
        """Return what a tensor is pickled as, in place of its bytes; None where these have to be sent."""
        if self._driver is None or self.refusal or tensor.nbytes < WORTH_LENDING_BYTES or not is_plain(tensor):
            return None
        if tensor.untyped_storage()._cdata not in self._storages:  # some rows that had to be gathered, say
            return None
        try:
            handle, offset = self._driver.handle(tensor.data_ptr(), tensor.nbytes)
        except DriverError as error:
            self.refusal = str(error)
            return None
        self.lent += tensor.nbytes
        return borrowed, (handle, offset, str(tensor.dtype)[6:], tuple(tensor.shape))


def handle_of(tensor: Any) -> tuple[Any, ...] | None:
    """Return what a device's tensor is pickled as where it is lent; see `Lender.lending`."""
    lender: Lender | None = getattr(_here, "lender", None)
    return None if lender is None else lender.handle(tensor)


class Borrower:
    """Copies what others lend."""

    def __init__(self, device: str) -> None:
        """Args: device: Where to."""
        self._device = device
        self._side = SideStream(device)

    @contextlib.contextmanager
    def borrowing(self) -> Iterator[None]:
        """A block in which this thread unpacks what is lent; all copies are complete at its end."""
        found = driver(self._device)
        assert found is not None
        _here.borrower = loan = _Loan(found, self._device, self._side)
        try:
            yield
        finally:
            _here.borrower = None
            loan.end()


class _Loan:
    """What is open for one value."""

    def __init__(self, found: Driver, device: str, side: SideStream) -> None:
        self._driver = found
        self._device = device
        self._side = side
        self._open: dict[bytes, int] = {}
        self._stream: Any = None

    def copy(self, handle: bytes, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        torch = sys.modules["torch"]
        tensor = empty(shape, getattr(torch, dtype), self._device)
        try:
            if handle not in self._open:
                self._open[handle] = self._driver.open(handle)
            with self._side.amid(in_use(self._device)) as self._stream:
                self._driver.copy(tensor.data_ptr(), self._open[handle] + offset, tensor.nbytes, self._stream)
        except DriverError as error:
            raise NotLentError(str(error)) from error
        return tensor

    def end(self) -> None:
        try:
            if self._stream is not None:
                self._stream.synchronize()
        except RuntimeError as error:
            error.add_note(f"{self._device} told this when memory that another worker lends was copied there")
            raise
        finally:
            for address in self._open.values():
                with contextlib.suppress(DriverError):  # a context that is lost has nothing open, and has told so
                    self._driver.close(address)


def borrowed(handle: bytes, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """A copy of a tensor that is lent."""
    loan: _Loan = _here.borrower
    return loan.copy(handle, offset, dtype, shape)


def empty(shape: tuple[int, ...], dtype: Any, device: str) -> Any:
    """A tensor, for a copy. A test plays it."""
    return sys.modules["torch"].empty(shape, dtype=dtype, device=device)

"""A device's tensors on the host for several who read them: copied once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from colocate._devices.device_copies import WORTH_BYTES, flat, is_plain, to_host

_here = threading.local()  # .copies: those that are shared by what this thread packs


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
        """What there is on the host, as bytes."""
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
        copy = self._covering(storage, start, start + tensor.nbytes, tensor.itemsize)
        with copy.lock:
            if copy.host is None:
                copy.host = to_host(flat(tensor))
        memory = copy.host[start - copy.start :][: tensor.nbytes]
        return memory.view(tensor.dtype).view(tensor.shape)

    def _covering(self, storage: int, start: int, stop: int, itemsize: int) -> _Copy:
        with self._lock:
            for copy in self._copies:
                covers = copy.storage == storage and copy.start <= start and stop <= copy.stop
                if covers and (start - copy.start) % itemsize == 0:
                    return copy
            made = _Copy(storage, start, stop)
            self._copies.append(made)
            return made


def on_host(tensor: Any) -> Any:
    """A device's tensor on the host, to be sent; see `HostCopies.shared`."""
    copies: HostCopies | None = getattr(_here, "copies", None)
    return to_host(tensor) if copies is None else copies.of(tensor)

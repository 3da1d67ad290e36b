"""Forward a body while the body is still arriving (`IncomingBody`)."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from colocate.wire.memory_files import create_file, seal_length


class IncomingBody:
    """A body in a file that is filled as data arrive. Meanwhile other threads may forward the file's first bytes.

    Attributes:
        sizes: Sizes of the segments.
        length: Total length in bytes.
        file: The descriptor, open as long as this object exists.
        memory: The buffer to fill.
    """

    def __init__(self, sizes: Sequence[int], length: int) -> None:
        """Create an empty file with the body's length.

        Raises:
            OSError: No descriptor is free, or no memory.
        """
        self.sizes, self.length = sizes, length
        self._news = threading.Condition()
        self._received = 0
        self._is_failed = False
        self.file = create_file()
        os.ftruncate(self.file, length)
        seal_length(self.file)
        self.memory = memoryview(mmap.mmap(self.file, length))

    def set_received(self, come: int) -> None:
        """Record the number of bytes that have arrived."""
        with self._news:
            self._received = come
            if come == self.length:
                del self.memory
            self._news.notify_all()

    def mark_failed(self) -> None:
        """Mark the body as broken, because no more bytes will arrive."""
        with self._news:
            self._is_failed = True
            self._news.notify_all()

    def wait_for_more(self, than: int) -> int:
        """Wait until the number of arrived bytes exceeds `than`, and return the number.

        Raises:
            ConnectionAbortedError: The body is broken.
        """
        with self._news:
            while self._received <= than:
                if self._is_failed:
                    raise ConnectionAbortedError("what is passed on has not come to its end")
                self._news.wait()
            return self._received

    def duplicate_file(self) -> int:
        """Return a duplicate of the file's descriptor; -1 if no descriptor is free."""
        try:
            return os.dup(self.file)
        except OSError:
            return -1

    def __del__(self) -> None:
        if (file := getattr(self, "file", -1)) >= 0:
            os.close(file)


OpenBuffer: TypeAlias = Callable[[tuple[object, ...], Sequence[int], int], "IncomingBody | None"]
"""Returns the destination of a body, from the message's head and the body's sizes and length; None for memory."""

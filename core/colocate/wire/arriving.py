"""Forward a body while the body is still arriving (`Arriving`)."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from colocate.wire.memory_files import keep_length, new_file


class Arriving:
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
        self._come = 0
        self._failed = False
        self.file = new_file()
        os.ftruncate(self.file, length)
        keep_length(self.file)
        self.memory = memoryview(mmap.mmap(self.file, length))

    def grew(self, come: int) -> None:
        """Record the number of bytes that have arrived."""
        with self._news:
            self._come = come
            if come == self.length:
                del self.memory
            self._news.notify_all()

    def fail(self) -> None:
        """Mark the body as broken, because no more bytes will arrive."""
        with self._news:
            self._failed = True
            self._news.notify_all()

    def wait(self, than: int) -> int:
        """Wait until more than `than` bytes have arrived; return the number of arrived bytes.

        Raises:
            ConnectionAbortedError: The body is broken.
        """
        with self._news:
            while self._come <= than:
                if self._failed:
                    raise ConnectionAbortedError("what is passed on has not come to its end")
                self._news.wait()
            return self._come

    def again(self) -> int:
        """Return a duplicate of the file's descriptor; -1 if no descriptor is free."""
        try:
            return os.dup(self.file)
        except OSError:
            return -1

    def __del__(self) -> None:
        if (file := getattr(self, "file", -1)) >= 0:
            os.close(file)


Arrives: TypeAlias = Callable[[tuple[object, ...], Sequence[int], int], "Arriving | None"]
"""Returns the destination of a body, from the message's head and the body's sizes and length; None for memory."""

"""`Arriving`: a body that is sent on while it arrives."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from colocate.wire.memory_files import keep_length, new_file


class Arriving:
    """A body in a file, as much of it as has come. Others may have it sent on from there; nobody writes over it.

    Attributes:
        sizes: Of its segments.
        length: Of all of it.
        file: The descriptor, which is open as long as this exists.
        memory: Where it is to be written.
    """

    def __init__(self, sizes: Sequence[int], length: int) -> None:
        """Nothing has come.

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
        """Note that so much has come, all together."""
        with self._news:
            self._come = come
            if come == self.length:
                del self.memory
            self._news.notify_all()

    def fail(self) -> None:
        """No more of it will come."""
        with self._news:
            self._failed = True
            self._news.notify_all()

    def wait(self, than: int) -> int:
        """Wait until more has come; how much that is.

        Raises:
            ConnectionAbortedError: No more will.
        """
        with self._news:
            while self._come <= than:
                if self._failed:
                    raise ConnectionAbortedError("what is passed on has not come to its end")
                self._news.wait()
            return self._come

    def again(self) -> int:
        """Return another descriptor of the file; -1 where none is free."""
        try:
            return os.dup(self.file)
        except OSError:
            return -1

    def __del__(self) -> None:
        if (file := getattr(self, "file", -1)) >= 0:
            os.close(file)


Arrives: TypeAlias = Callable[[tuple[object, ...], Sequence[int], int], "Arriving | None"]
"""Given a head, and sizes and length of the body that follows: where that is to arrive; None for memory alone."""

"""Files that grow by whole pieces."""

from __future__ import annotations

import contextlib
from io import FileIO
from pathlib import Path


class GrowingFile:
    """A file to which text is added: all of a piece, or, where the disk is full, nothing of it."""

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        """Open it.

        Args:
            path: Where it is; made where there is none.
            anew: Whether what is in it goes.

        Raises:
            OSError: It can't be written.
        """
        self.path = path
        self._file = FileIO(path, "w" if anew else "a")

    def add(self, text: str) -> None:
        """Add a piece; who reads the file sees it from now on.

        Raises:
            OSError: The disk is full, or the like; its `filename` says which file it is about.
        """
        end = self._file.seek(0, 2) if self._file.seekable() else None  # of a pipe nothing can be taken back
        left = memoryview(text.encode())
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            if end is not None:
                with contextlib.suppress(OSError):
                    self._file.truncate(end)
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        """Add nothing any more."""
        self._file.close()

"""Runs a module's source that came from the driver.

By itself, because `importlib.abc` imports much of what a worker does without.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import types
from pathlib import Path
from types import CodeType
from typing import Any

from colocate._definitions.sources import Source


class Loader(importlib.abc.InspectLoader):
    """Runs the source that came."""

    def __init__(self, source: Source, path: str | None) -> None:
        self._source = source
        self._path = path

    def is_package(self, fullname: str) -> bool:
        """Whether it is a package."""
        return self._source.package

    def get_source(self, fullname: str) -> str:
        """Its text."""
        return importlib.util.decode_source(self._source.text)

    def get_code(self, fullname: str) -> CodeType:
        """What runs."""
        code: CodeType = compile(self._source.text, self._path or f"<{fullname}>", "exec", dont_inherit=True)
        return code

    def get_data(self, path: str) -> bytes:
        """For `pkgutil`: a file beside it, which isn't here, as the error says."""
        return Path(path).read_bytes()

    def get_resource_reader(self, fullname: str) -> Any:
        """For `importlib.resources`: the same."""
        from importlib.resources.readers import FileReader  # only who has resources wants it

        where: Any = types.SimpleNamespace(path=self._path or "")
        return FileReader(where)

"""Read colocate's modules into memory before the first import, because files may change while a process runs.

A feature is imported on first use, perhaps days after the start. By then `pip install -U` or `git pull` may have
replaced its files, and the process may lack a free descriptor to open one. Reading all files takes ten milliseconds;
importing all would take half as long as the rest of a worker's start.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import cache_from_source, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

_FOR_TESTS = "testing"
# Features need these modules of the standard library, which a worker's start doesn't import.
_OF_PYTHON = ("decimal", "fractions")
_packages: set[str] = set()
_loaders: dict[str, _Loader] = {}
# These are the kinds of Python's own finders, because a package named colocate_… may have compiled modules.
_KINDS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


def preload_modules() -> None:
    """Read all modules of the imported colocate packages; later imports use these copies."""
    for name in _OF_PYTHON:
        import_module(name)
    for package in [name for name in list(sys.modules) if "." not in name and name.startswith("colocate")]:
        if package not in _packages:
            _packages.add(package)
            for root in getattr(sys.modules[package], "__path__", ()):
                _preload_package(package, root)


def _preload_package(package: str, root: str) -> None:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in ("__pycache__", _FOR_TESTS)]
        parent = [package, *Path(folder).relative_to(root).parts]
        for file in files:
            stem, suffix = os.path.splitext(file)
            name = ".".join(parent if stem == "__init__" else [*parent, stem])
            if suffix == ".py" and name not in sys.modules:
                with contextlib.suppress(OSError):  # A module that can't be read is imported from disk later, as usual.
                    _loaders[name] = _Loader(name, os.path.join(folder, file))
        sys.path_importer_cache[folder] = _Finder(folder, *_KINDS)


class _Loader(SourceFileLoader):
    """Loads a module from bytes that were read earlier."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self._stats = super().path_stats(path)
        self._data: dict[str, bytes] = {}
        compiled = cache_from_source(path)
        with contextlib.suppress(OSError):
            self._data[compiled] = super().get_data(compiled)
        times = b"".join(int(self._stats[key]).to_bytes(8, "little")[:4] for key in ("mtime", "size"))
        if self._data.get(compiled, b"")[4:16] != b"\0\0\0\0" + times:  # The compiled module is missing or outdated.
            self._data[path] = super().get_data(path)

    def path_stats(self, path: Any) -> Any:
        """Return the source's time and size, for Python's check that the compiled module is current."""
        return self._stats

    def get_data(self, path: Any) -> bytes:
        data = self._data.get(path)
        return super().get_data(path) if data is None else data


class _Finder(FileFinder):
    """Finds the modules of one folder, in memory first and then on disk."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        loader = _loaders.get(fullname)
        if loader is None:
            return super().find_spec(fullname, target)
        return spec_from_file_location(fullname, loader.path, loader=loader)

"""Imports the driver's modules in a worker. Modules next to the driver's script arrive as source code."""

from __future__ import annotations

import _imp
import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from colocate import features
from colocate._definitions.sources import RefusedModule, Source, describe_conflict, hash_text, is_shipped_with_python
from colocate._system.jobs import get_message
from colocate.errors import ColocateError

Ask = Callable[[str], Mapping[str, Source | RefusedModule]]


def is_importing(frame: FrameType) -> bool:
    """Return whether a frame runs the top-level code of a module that is being imported."""
    spec = frame.f_globals.get("__spec__")
    return frame.f_code.co_name == "<module>" and getattr(spec, "_initializing", False)


def get_importing_module(frames: Iterable[FrameType]) -> str | None:
    """Return the outermost module that the code of these frames (innermost first) is importing, or None."""
    names = [str(frame.f_globals["__name__"]) for frame in frames if is_importing(frame)]
    return names[-1] if names else None


class _Loader(SourceFileLoader):
    """Loads a driver's module from source code. Files next to the module don't exist here."""

    def __init__(self, name: str, source: Source, path: str | None) -> None:
        super().__init__(name, path or "")
        self._source = source

    def is_package(self, fullname: str) -> bool:
        return self._source.package

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._source.text)

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self._source.text, self.path or f"<{fullname}>", "exec", dont_inherit=True)
        return code


class DriverModuleFinder:
    """Import finder that asks the driver before all other finders, once for each name outside the standard library."""

    def __init__(self, ask: Ask) -> None:
        """Args: ask: Asks the driver for a module; raises ColocateError when the driver can't be asked."""
        self._ask = ask
        self._sources: dict[str, Source | RefusedModule] = {}
        self._own_packages: set[str] = set()  # Top-level packages that this machine provides and the driver doesn't.
        # The driver's modules that replace modules of the standard library.
        self.shadowing: frozenset[str] = frozenset()
        self._pid = os.getpid()
        self.receiver: int | None = None  # Id of the thread that receives the driver's answers.

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module if the driver has the module."""
        top = name.partition(".")[0]
        if top in self._own_packages or (is_shipped_with_python(name) and top not in self.shadowing):
            return None
        source = self._sources.get(name)
        answer, refusal = None, ""
        if source is None and self._can_ask():
            try:
                with _without_import_lock():
                    answer = self._ask(name)
            except ColocateError as error:  # The driver can't be reached, or has no answer.
                refusal = error.message
        if answer:
            self._sources.update(answer)
            source = answer.get(name)
        if isinstance(source, Source):
            return _make_spec(name, source)
        other = PathFinder.find_spec(name, path)
        if isinstance(source, RefusedModule) and other is None:
            raise ImportError(f"module {name!r} can't be had in this worker: {source.reason}", name=name)
        if refusal and other is None:
            raise ModuleNotFoundError(
                f"module {name!r} isn't installed in this worker, and the driver couldn't be asked for it: {refusal}",
                name=name,
            )
        if answer == {} and "." not in name and other is not None:
            self._own_packages.add(name)
        return other

    def add_sources(self, sources: Mapping[str, Source]) -> None:
        """Add module sources without asking the driver."""
        self._sources.update(sources)

    def drop_unimported(self) -> None:
        """Forget modules that nobody has imported yet, so that the next driver is asked for these modules."""
        self._sources = {name: source for name, source in self._sources.items() if name in sys.modules}

    def _can_ask(self) -> bool:
        """Return whether the driver may be asked. This isn't possible in a forked child or on the receiving thread."""
        thread = threading.get_ident()
        return os.getpid() == self._pid and thread != self.receiver and thread not in features.importing_threads


@contextlib.contextmanager
def _without_import_lock() -> Iterator[None]:
    """Release the lock that importlib holds during `find_spec`.

    The receiving thread takes that lock, too, when it drops the last reference to a module's own lock.
    """
    try:
        _imp.release_lock()
    except RuntimeError:  # No import is running, because the finder was called directly.
        yield
        return
    try:
        yield
    finally:
        _imp.acquire_lock()


def _make_spec(name: str, source: Source) -> ModuleSpec | None:
    path = source.file
    with contextlib.suppress(OSError):
        # The driver's file exists on this machine, too.
        if path is not None and Path(path).read_bytes() == source.text:
            return importlib.util.spec_from_file_location(name, path)
    if path is not None:
        if os.path.exists(path):  # A different file of this name exists on this machine.
            path = f"driver:{path}"
        _folders_elsewhere.add(os.path.dirname(path))
    spec = ModuleSpec(name, _Loader(name, source, path), origin=path, is_package=source.package)
    spec.has_location = path is not None  # This lets tracebacks and `inspect` read the source through the loader.
    return spec


def get_own_sources() -> dict[str, Source]:
    """Return the sources received from the driver, for a child process."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, DriverModuleFinder)]
    pairs = [(name, source) for finder in finders for name, source in finder._sources.items()]
    return {name: source for name, source in pairs if isinstance(source, Source)}


_folders_elsewhere: set[str] = set()  # Folders on the driver's machine that contain modules received as source.


# This matches pickle's error text.
_OF_SCRIPT = re.compile(r"Can't get attribute '([^'.]+).* on <module 'colocate\.worker\.[\w.]+'")


_LACKING = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")  # This matches Python's error text.


def find_hint(error: BaseException) -> str | None:
    """Return advice on an error about a missing file beside the driver's code, or a missing name of the script."""
    if isinstance(error, AttributeError) and (unknown := _OF_SCRIPT.match(get_message(error))):
        return (
            "A worker has what the script defines once it was sent something that needs it, and plain pickle wants it "
            f"there already: name {unknown[1]} in the role's code, or define it in a module, which a worker imports"
        )
    if isinstance(error, ImportError) and (lacking := _LACKING.match(get_message(error))):
        if not hasattr(sys.modules.get(lacking[2]), lacking[1]):
            return None
        return (
            f"{lacking[2]} has {lacking[1]} by now: several threads have imported it at once, which a module that "
            "puts another one in its own place doesn't stand. Import it at the top of the script or module, or use "
            "processes (connect('local', processes=True))"
        )
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str):
        return None
    script = getattr(sys.modules["__main__"], "__file__", None) or __file__
    folders = _folders_elsewhere if os.path.exists(script) else {*_folders_elsewhere, os.path.dirname(script)}
    if not any(Path(error.filename).is_relative_to(folder) for folder in folders):
        return None
    return (
        "The driver's modules came here as source, without the files beside them: install the package where the "
        "workers run, or read the file in the driver and pass its content"
    )


def check_shadowing(shadowing: Mapping[str, tuple[str, str]]) -> None:
    """Check that the driver's replacements of standard modules can be imported here, too.

    Args:
        shadowing: By name, the driver's file and the digest of its content.

    Raises:
        ColocateError: The standard library's module is imported already.
    """
    for name, (file, content) in shadowing.items():
        local_file: Any = getattr(sys.modules.get(name), "__file__", None)
        if local_file is not None and (
            not local_file.endswith(".py") or hash_text(Path(local_file).read_bytes()) != content
        ):
            raise ColocateError(describe_conflict(name, file, local_file))


@functools.cache
def list_early_imports() -> dict[str, tuple[str, str]]:
    """Return file and digest of the modules imported before this function's first call, without Python's own modules.

    The template calls this for its forks, because inspecting all modules changes reference counts, which would unshare
    a fork's memory.
    """
    digests: dict[str, tuple[str, str]] = {}
    for name, module in list(sys.modules.items()):
        file: Any = getattr(module, "__file__", None)
        if "." in name or is_shipped_with_python(name) or not isinstance(file, str) or not file.endswith(".py"):
            continue
        try:
            digests[name] = file, hash_text(Path(file).read_bytes())
        except OSError:  # The module is in an archive.
            continue
    return digests

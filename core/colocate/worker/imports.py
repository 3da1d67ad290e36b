"""What a worker imports: modules beside the driver's script come from there, as source; all else is its own."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from colocate._definitions.sources import Refused, Source, digest, is_shipped_with_python
from colocate.errors import ColocateError

Ask = Callable[[str], Mapping[str, Source | Refused]]


class DriversModules(importlib.abc.MetaPathFinder):
    """Finds the driver's modules before any other. Asks once for each name that isn't in the standard library."""

    def __init__(self, ask: Ask) -> None:
        """Args: ask: What the driver has of a module; ColocateError when it can't be asked."""
        self._ask = ask
        self._found: dict[str, Source | Refused] = {}
        self._others: set[str] = set()  # packages that are this machine's own
        self._pid = os.getpid()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Where a module is imported from, if the driver has it."""
        if is_shipped_with_python(name) or name.partition(".")[0] in self._others:
            return None
        found = self._found.get(name)
        answer, unasked = None, ""
        if found is None and self._may_ask():
            try:
                answer = self._ask(name)
            except ColocateError as error:  # there is no driver now, or nobody may wait for it, or it can't tell
                unasked = error.message
        if answer:
            self._found.update(answer)
            found = answer.get(name)
        if isinstance(found, Source):
            return _spec(name, found)
        other = PathFinder.find_spec(name, path)
        if isinstance(found, Refused) and other is None:
            raise ImportError(f"module {name!r} can't be had in this worker: {found.why}", name=name)
        if unasked and other is None:
            raise ModuleNotFoundError(
                f"module {name!r} isn't installed in this worker, and the driver couldn't be asked for it: {unasked}",
                name=name,
            )
        if answer == {} and "." not in name and other is not None:
            self._others.add(name)
        return other

    def _may_ask(self) -> bool:
        """Not in a child that a role has forked, and not on the thread that would have to receive the answer."""
        return os.getpid() == self._pid and threading.current_thread() is not threading.main_thread()


def _spec(name: str, source: Source) -> ModuleSpec | None:
    if source.file is not None and _is_here(source):
        return importlib.util.spec_from_file_location(name, source.file)
    spec = ModuleSpec(name, _Loader(source), origin=source.file, is_package=source.package)
    # Tracebacks and `inspect` read the driver's file through the loader. Where another file lies there, it has no path.
    spec.has_location = source.file is not None and not os.path.exists(source.file)
    return spec


def _is_here(source: Source) -> bool:
    """Whether the driver's file lies on this machine, too."""
    assert source.file is not None
    try:
        return Path(source.file).read_bytes() == source.text
    except OSError:
        return False


class _Loader(importlib.abc.InspectLoader):
    """Runs the source that came."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def is_package(self, fullname: str) -> bool:
        return self._source.package

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._source.text)

    def get_code(self, fullname: str) -> CodeType:
        file = self._source.file
        where = f"<{fullname}>" if file is None else f"<{file} of the driver>" if os.path.exists(file) else file
        code: CodeType = compile(self._source.text, where, "exec", dont_inherit=True)
        return code

    def get_data(self, path: str) -> bytes:
        raise FileNotFoundError(
            f"{path} isn't on this machine: a module of the driver's came here as source, without the files beside it. "
            "Install the package where the workers run, or read the file in the driver and pass its content"
        )


def imported_already() -> dict[str, tuple[str, str]]:
    """The modules that this process has imported so far and that aren't in the standard library: file and digest."""
    found: dict[str, tuple[str, str]] = {}
    for name, module in list(sys.modules.items()):
        file: Any = getattr(module, "__file__", None)
        if "." in name or is_shipped_with_python(name) or not isinstance(file, str) or not file.endswith(".py"):
            continue
        try:
            found[name] = file, digest(Path(file).read_bytes())
        except OSError:  # in an archive
            continue
    return found

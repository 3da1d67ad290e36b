"""What a worker imports: modules beside the driver's script come from there, as source; all else is its own."""

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
from colocate._definitions.sources import Refused, Source, digest, in_the_way, is_shipped_with_python
from colocate._system.jobs import message_of
from colocate.errors import ColocateError

Ask = Callable[[str], Mapping[str, Source | Refused]]


def is_importing(frame: FrameType) -> bool:
    """Whether it is the code of a module that is being imported."""
    spec = frame.f_globals.get("__spec__")
    return frame.f_code.co_name == "<module>" and getattr(spec, "_initializing", False)


def importing(frames: Iterable[FrameType]) -> str | None:
    """The module that code with these frames, the innermost first, imports; of several that which wants the others."""
    names = [str(frame.f_globals["__name__"]) for frame in frames if is_importing(frame)]
    return names[-1] if names else None


class _Loader(SourceFileLoader):
    """Runs a module's source that came from the driver, and looks for files beside it: they aren't here."""

    def __init__(self, name: str, source: Source, path: str | None) -> None:
        super().__init__(name, path or "")
        self._source = source

    def is_package(self, fullname: str) -> bool:
        """Whether it is a package."""
        return self._source.package

    def get_source(self, fullname: str) -> str:
        """Return its text."""
        return importlib.util.decode_source(self._source.text)

    def get_code(self, fullname: str) -> CodeType:
        """Return what runs."""
        code: CodeType = compile(self._source.text, self.path or f"<{fullname}>", "exec", dont_inherit=True)
        return code


class DriversModules:
    """Finds the driver's modules before any other. Asks once for each name that isn't in the standard library."""

    def __init__(self, ask: Ask) -> None:
        """Args: ask: What the driver has of a module; ColocateError when it can't be asked."""
        self._ask = ask
        self._found: dict[str, Source | Refused] = {}
        self._others: set[str] = set()  # packages that are this machine's own
        self.shadowing: frozenset[str] = frozenset()  # the driver's in place of the standard library's
        self._pid = os.getpid()
        self.receiver: int | None = None  # the thread that receives what the driver answers

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Where a module is imported from, if the driver has it."""
        top = name.partition(".")[0]
        if top in self._others or (is_shipped_with_python(name) and top not in self.shadowing):
            return None
        found = self._found.get(name)
        answer, unasked = None, ""
        if found is None and self._may_ask():
            try:
                with _without_import_lock():
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

    def know(self, sources: Mapping[str, Source]) -> None:
        """Have some modules without asking for them."""
        self._found.update(sources)

    def forget(self) -> None:
        """Another driver follows: what nobody has imported yet is that one's to give."""
        self._found = {name: found for name, found in self._found.items() if name in sys.modules}

    def _may_ask(self) -> bool:
        """Not in a child that a role has forked, nor on a thread that would have to receive the answer."""
        thread = threading.get_ident()
        return os.getpid() == self._pid and thread != self.receiver and thread not in features.importing


@contextlib.contextmanager
def _without_import_lock() -> Iterator[None]:
    """Let go of the lock that importlib holds while a finder looks.

    The thread that receives the answer takes that lock, too, when it drops the last reference to a module's own lock.
    """
    try:
        _imp.release_lock()
    except RuntimeError:  # nobody imports: the finder was called by itself
        yield
        return
    try:
        yield
    finally:
        _imp.acquire_lock()


def _spec(name: str, source: Source) -> ModuleSpec | None:
    path = source.file
    with contextlib.suppress(OSError):
        if path is not None and Path(path).read_bytes() == source.text:  # the driver's file lies on this machine, too
            return importlib.util.spec_from_file_location(name, path)
    if path is not None:
        if os.path.exists(path):  # another one
            path = f"driver:{path}"
        _folders_elsewhere.add(os.path.dirname(path))
    spec = ModuleSpec(name, _Loader(name, source, path), origin=path, is_package=source.package)
    spec.has_location = path is not None  # then tracebacks and `inspect` read the source through the loader
    return spec


def own_sources() -> dict[str, Source]:
    """Return the modules that this process has got from its driver, for a child of it."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, DriversModules)]
    found = [(name, each) for finder in finders for name, each in finder._found.items()]
    return {name: each for name, each in found if isinstance(each, Source)}


_folders_elsewhere: set[str] = set()  # of modules that came as source


_OF_SCRIPT = re.compile(r"Can't get attribute '([^'.]+).* on <module 'colocate\.worker\.[\w.]+'")  # as pickle says it


_LACKING = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")  # as Python says it


def hint_for(error: BaseException) -> str | None:
    """Return what to do about what isn't in this process: a file beside the driver's code, a name of its script."""
    if isinstance(error, AttributeError) and (unknown := _OF_SCRIPT.match(message_of(error))):
        return (
            "A worker has what the script defines once it was sent something that needs it, and plain pickle wants it "
            f"there already: name {unknown[1]} in the role's code, or define it in a module, which a worker imports"
        )
    if isinstance(error, ImportError) and (lacking := _LACKING.match(message_of(error))):
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


def refuse_others(shadowing: Mapping[str, tuple[str, str]]) -> None:
    """See that what the driver has in place of the standard library's modules can be had here, too.

    Args:
        shadowing: By name: the driver's file, and the digest of its content.

    Raises:
        ColocateError: The standard library's is imported already.
    """
    for name, (file, content) in shadowing.items():
        there: Any = getattr(sys.modules.get(name), "__file__", None)
        if there is not None and (not there.endswith(".py") or digest(Path(there).read_bytes()) != content):
            raise ColocateError(in_the_way(name, file, there))


@functools.cache
def imported_already() -> dict[str, tuple[str, str]]:
    """The modules that this process had imported when it first asked, and that aren't Python's: file and digest.

    A template asks for its forks: whoever looks at all modules writes into their memory, by counting references.
    """
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

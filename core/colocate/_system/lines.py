"""Lines of users' code: which of them called, as messages have it; what is the framework's own code."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import CodeType

from colocate._signals.deferred import frames
from colocate.errors import ConfigError

_CORE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = tuple(os.path.join(os.path.dirname(_CORE), name, "") for name in ("colocate", "colocate_run", "colocate_report"))
_TESTING = os.path.join(_CORE, "testing", "")  # its suites are users of colocate
_libraries: dict[str, tuple[str, ...]] = {}  # by name, the files and folders of modules that are built on colocate


def library(name: str) -> None:
    """Have the lines of a library that is built on colocate be passed by, as colocate's own are.

    Errors and the graph then name the line of the library's user that made a call or a group, and not the library's.

    Args:
        name: The library's package, or one module: usually `__name__`, in the package's `__init__.py`. With a package
            go all modules below it.

    Raises:
        ConfigError: No such module is imported, or it has no file.
    """
    module = sys.modules.get(name)
    folders = [os.path.join(os.path.abspath(folder), "") for folder in getattr(module, "__path__", ())]
    found = (*folders, *filter(None, [getattr(module, "__file__", None)]))
    if not found:
        raise ConfigError(
            f"library({name!r}): no module of that name is imported from a file; a library says "
            "colocate.library(__name__) in its __init__.py"
        )
    _libraries[name] = found
    _is_passed_by.cache_clear()


def caller() -> tuple[str, int]:
    """Return file and line of the user's code that called into colocate."""
    code, line = place(1)
    return (code if isinstance(code, str) else shown(code)), line


def place(depth: int) -> tuple[CodeType | str, int]:
    """Code and line of the user's code that called into colocate, from `depth` frames above the caller's own on."""
    try:
        frame = sys._getframe(depth + 1)
    except ValueError:  # it wasn't Python code that has called
        frame = sys._getframe(1)
    code = frame.f_code
    if not _is_passed_by(code.co_filename):
        return code, frame.f_lineno
    for each in frames():
        if not _is_passed_by(each.f_code.co_filename):
            return each.f_code, each.f_lineno
    return "?", 0


def shown(code: CodeType) -> str:
    """Return the file of some code, as its user knows it."""
    return cell(code.co_filename) or code.co_filename


def cell(file: str) -> str | None:
    """Return what IPython calls a cell, which it runs as a file of a name that tells nobody anything: "Cell In[3]"."""
    running = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if running is None else running()
    name = None if shell is None else shell.compile.format_code_name(file)
    return None if name is None else " ".join(name)


def with_cells(trace: str) -> str:
    """Return a worker's traceback, with cells as their user knows them, and their source, which isn't a file there."""
    return _FRAME.sub(_of_cell, trace) if "IPython" in sys.modules else trace


_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+)(.*\n)((?:    .*\n)*)', re.MULTILINE)


def _of_cell(frame: re.Match[str]) -> str:
    file, number, rest, source = frame.groups()
    name = cell(file)
    if name is None:
        return frame[0]
    if not source and (line := linecache.getline(file, int(number)).strip()):
        source = f"    {line}\n"
    return f'  File "{name}", line {number}{rest}{source}'


def at(line: tuple[str, int]) -> str:
    """Return a line as messages have it. What a command-line option has made has no number, and the option's text."""
    where, number = line
    return f"{where}:{number}" if number else where


_made_for: ContextVar[tuple[str, int] | None] = ContextVar("made_for", default=None)


def origin() -> tuple[str, int]:
    """Return the line that what is made now is made for."""
    return _made_for.get() or caller()


@contextlib.contextmanager
def made_for(line: tuple[str, int] | None) -> Iterator[None]:
    """Count what this thread makes in the block as made for a line, of a config say, not for the code that does so."""
    token = _made_for.set(line)
    try:
        yield
    finally:
        _made_for.reset(token)


@functools.lru_cache(maxsize=1024)
def _is_passed_by(file: str) -> bool:
    """Return whether code in a file is none of the user's: colocate's, a library's, or what enters a block for it."""
    return "contextlib" in file or is_own_code(file) or any(map(file.startswith, _libraries.values()))


def is_own_code(file: str) -> bool:
    """Return whether a file is a part of colocate's core, or of what runs jobs and reports them."""
    return file.startswith(_OWN) and not file.startswith(_TESTING)

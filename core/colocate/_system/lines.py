"""Find the lines of users' code for messages, and distinguish users' code from the framework's."""

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

from colocate._signals.deferred import iter_frames
from colocate.errors import ConfigError

_CORE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = tuple(os.path.join(os.path.dirname(_CORE), name, "") for name in ("colocate", "colocate_run", "colocate_report"))
_TESTING = os.path.join(_CORE, "testing", "")  # Test suites count as users of colocate.
_libraries: dict[str, tuple[str, ...]] = {}  # The paths of each library's files and folders, by module name.


def library(name: str) -> None:
    """Treat a library that is built on colocate as colocate's own code: messages skip its lines.

    Errors and the graph then name the line in the user's code that made a call or a group, not the library's.

    Args:
        name: The library's package, or one module: usually `__name__`, in the package's `__init__.py`. A package
            includes all modules below.

    Raises:
        ConfigError: No such module is imported, or the module has no file.
    """
    module = sys.modules.get(name)
    folders = [os.path.join(os.path.abspath(folder), "") for folder in getattr(module, "__path__", ())]
    paths = (*folders, *filter(None, [getattr(module, "__file__", None)]))
    if not paths:
        raise ConfigError(
            f"library({name!r}): no module of that name is imported from a file; a library says "
            "colocate.library(__name__) in its __init__.py"
        )
    _libraries[name] = paths
    _is_skipped.cache_clear()


def find_caller() -> tuple[str, int]:
    """Return file and line of the user's code that called into colocate."""
    code, line = find_user_line(1)
    return (code if isinstance(code, str) else get_shown_file(code)), line


def find_user_line(depth: int) -> tuple[CodeType | str, int]:
    """Return the code object and line of the user's call into colocate; the search starts `depth` frames up."""
    try:
        frame = sys._getframe(depth + 1)
    except ValueError:  # The stack is too short, because the caller isn't Python code.
        frame = sys._getframe(1)
    code = frame.f_code
    if not _is_skipped(code.co_filename):
        return code, frame.f_lineno
    for outer in iter_frames():
        if not _is_skipped(outer.f_code.co_filename):
            return outer.f_code, outer.f_lineno
    return "?", 0


def get_shown_file(code: CodeType) -> str:
    """Return the file name of a code object; for a cell of IPython, the cell's name."""
    return get_cell_name(code.co_filename) or code.co_filename


def get_cell_name(file: str) -> str | None:
    """Return IPython's name of a cell ("Cell In[3]"), given the file name of the cell's code; None for other files."""
    running = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if running is None else running()
    name = None if shell is None else shell.compile.format_code_name(file)
    return None if name is None else " ".join(name)


def replace_cells(trace: str) -> str:
    """Return a worker's traceback with IPython's cell names, and with the cells' source lines, which workers lack."""
    return _FRAME.sub(_replace_cell, trace) if "IPython" in sys.modules else trace


_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+)(.*\n)((?:    .*\n)*)', re.MULTILINE)


def _replace_cell(frame: re.Match[str]) -> str:
    file, number, rest, source = frame.groups()
    name = get_cell_name(file)
    if name is None:
        return frame[0]
    if not source and (line := linecache.getline(file, int(number)).strip()):
        source = f"    {line}\n"
    return f'  File "{name}", line {number}{rest}{source}'


def format_line(line: tuple[str, int]) -> str:
    """Format a file and line number for messages. For number 0, the file is the text of a command-line option."""
    where, number = line
    return f"{where}:{number}" if number else where


_made_for: ContextVar[tuple[str, int] | None] = ContextVar("made_for", default=None)


def get_origin() -> tuple[str, int]:
    """Return the file and line to record as the origin of new objects."""
    return _made_for.get() or find_caller()


@contextlib.contextmanager
def attribute_to(line: tuple[str, int] | None) -> Iterator[None]:
    """Set the origin of all objects that this thread makes in a block, for example to a line of a config."""
    token = _made_for.set(line)
    try:
        yield
    finally:
        _made_for.reset(token)


@functools.lru_cache(maxsize=1024)
def _is_skipped(file: str) -> bool:
    return "contextlib" in file or is_own_code(file) or any(map(file.startswith, _libraries.values()))


def is_own_code(file: str) -> bool:
    """Return whether a file belongs to colocate's core, runner or report."""
    return file.startswith(_OWN) and not file.startswith(_TESTING)

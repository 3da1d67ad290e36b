"""Turns exceptions of role code into data for the driver: a pickle if possible, otherwise text."""

from __future__ import annotations

import gc
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, chain, islice, repeat
from operator import itemgetter
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from colocate._protocol.consequence import OWN_WORDS, Consequence
from colocate._protocol.from_worker import Failure
from colocate._role.context import current
from colocate._system.imported import find_imported
from colocate._system.jobs import get_message
from colocate._system.tracebacks import NotRebuilt, format_exception, format_user_frames
from colocate._values.codec import Codec
from colocate.errors import (
    CapabilityError,
    ChildDied,
    MemoryBudgetError,
)
from colocate.worker.birth import imports
from colocate.worker.serving.definitions import Definitions

_OWN = tuple(str(Path(__file__).parents[2] / package) for package in ("worker", "_protocol"))
_DEBUGGER = re.compile(r"[/\\](bdb\.py$|pydevd|debugpy[/\\]|colocate[/\\]features[/\\]debugging[/\\])")
_RUNS_LANE = (threading.__file__, "<frozen runpy>")
_NEEDS_MAIN = ("signal only works in main thread", "There is no current event loop in thread")
_IN_BACKGROUND = (
    "A background role has a thread of its own here, and Python lets nothing but a process's main thread set handlers "
    "of signals: leave background=True out, or do without (a child process can be given a time limit)"
)
_ON_THREADS = (
    "Slots are threads of the driver here, and Python lets nothing but a process's main thread set handlers of "
    "signals, or make its event loop by itself; in a worker process that is the thread of role code: use "
    "connect('local', processes=True), in a config executor.with.processes=true"
)
_ATTRIBUTES: Any = vars(BaseException)
_CALLS_ROLES = {("build.py", "construct"), ("method_spec.py", "call")}

INSPECTION_LOCK = threading.RLock()
"""Held while a thread looks at the lane's frames, or at process groups: the look keeps objects alive that the lane has
dropped."""


def describe_failure(
    error: BaseException, codec: Codec, definitions: Definitions, role: str | None, secondary: bool
) -> tuple[Failure, Any]:
    """Return a failure report for the driver, and a body with the pickled exception (None if pickling fails)."""
    unbuilt = None
    if isinstance(error, NotRebuilt):
        unbuilt, error = error.subject, error.cause
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    # A colocate error that role code itself has raised is the role's failure.
    by_role = any(not name.startswith("colocate.") or name.startswith("colocate.testing.") for name in names)
    ours = isinstance(error, CapabilityError | ChildDied) or (isinstance(error, OWN_WORDS) and not by_role)
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = get_message(error)
    needs_main = isinstance(error, ValueError | RuntimeError) and text.startswith(_NEEDS_MAIN)
    on_main = threading.current_thread() is threading.main_thread()
    ctx = current()
    apart = _IN_BACKGROUND if ctx is not None and ctx.role in ctx._background else _ON_THREADS
    thread = apart if needs_main and not on_main else None
    for hint in (imports.find_hint(error), thread):
        if hint is not None:
            add_note(error, hint)
    may_be_ours = isinstance(error, Consequence) or unbuilt is not None
    follows = may_be_ours and not format_user_frames(error)  # A traceback without users' frames isn't shown.
    trace = "" if follows else format_exception(error, _skip_own_frames(error.__traceback__), whole=False)
    failure = Failure(name, text, trace, ours and unbuilt is None, secondary, role, unbuilt)
    return failure, _pack_error(error, codec, definitions)


def _pack_error(error: BaseException, codec: Codec, definitions: Definitions) -> Any:
    """Return a message body with the exception, or None if the exception doesn't survive pickling."""
    # These attributes are cleared, because their frames refer to tensors, files and process groups.
    for name in ("__traceback__", "__context__", "__cause__"):
        _ATTRIBUTES[name].__set__(error, None)  # This also works if the exception's class is frozen.
    if codec.name == "reference":
        return error
    try:
        body = codec.pack(error)
        again = codec.unpack(body, None)
        definitions.send_lacking(body)
    except BaseException:  # The exception's class controls pickling, and may raise anything.
        return None
    return body if type(again) is type(error) else None


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception, if the class allows that."""
    with suppress(Exception):
        error.add_note(text)


def format_role_stack(thread: threading.Thread) -> list[str]:
    """Return a thread's stack as text, beginning at role code if there is any. Return [] if the thread has ended."""
    return format_role_frames(list_frames(thread)[::-1])


def format_role_frames(frames: Sequence[FrameType]) -> list[str]:
    """Return frames (outermost first) as text, beginning at role code if there is any."""
    return traceback.format_list(
        trim_to_role_code(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames))
    )


def trim_to_role_code(stack: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """Remove the worker's frames around role code from a stack. A stack without role code stays complete.

    Frames of a debugger that has stopped the role are left out.
    """
    first = next((i for i, summary in enumerate(stack) if not _is_machinery(summary.filename)), 0)
    last = next((i for i, summary in enumerate(stack) if i >= first and _DEBUGGER.search(summary.filename)), len(stack))
    while first < last < len(stack) and _is_machinery(stack[last - 1].filename):
        last -= 1
    return stack[first:last]


def list_frames(thread: threading.Thread) -> list[FrameType]:
    """Return the frames of a thread, innermost first; empty when the thread has ended.

    A running thread's frames are stable only while it doesn't run. If Python code collected them, the thread could run
    in between: the stack would break off, and the outer frame of a generator that has returned would be arbitrary
    memory (CPython 3.11). So one C call collects all frames: it runs no Python code, and doesn't release the GIL.
    """
    frames: list[FrameType] = []
    innermost = map(itemgetter(thread.ident or 0), islice(iter(sys._current_frames, None), 1))
    # Each frame is the `f_back` of the frame before.
    outwards: Any = accumulate(chain(innermost, repeat("f_back")), getattr)
    # A garbage collection would run Python code.
    # In CPython up to 3.11.7 and 3.12.1, a collection that starts in `_current_frames` can deadlock (gh-106883).
    collecting = gc.isenabled()
    gc.disable()
    try:
        frames.extend(outwards)
    except KeyError:  # The thread has ended.
        return []
    except AttributeError:  # The None beyond the outermost frame ends the iteration, and the list is complete.
        pass
    finally:
        if collecting:
            gc.enable()
    return frames[:-1]


def _is_machinery(file: str) -> bool:
    return file.startswith(_OWN) or file.endswith("colocate/_role/method_spec.py") or file in _RUNS_LANE


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Remove the worker's own frames from a traceback, unless the error may come from the worker itself.

    Return None if the traceback ends in the call of role code, because then only the arguments don't fit.
    """
    entry = trace
    # The frame of `MethodSpec.call` is between the worker's frames and the role's frames.
    while entry is not None and _is_machinery(entry.tb_frame.f_code.co_filename):
        entry = entry.tb_next
    if entry is not None or trace is None:
        return entry
    last = trace
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    return None if (Path(code.co_filename).name, code.co_name) in _CALLS_ROLES else trace


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the host has no memory left."""
    if isinstance(error, MemoryError):
        # The text of a `MemoryBudgetError` already says which roles use the memory.
        return not isinstance(error, MemoryBudgetError)
    torch = find_imported("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in get_message(error) for words in _NO_MEMORY)


_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "error: out of memory",  # This is CUDA's own error text, not the text of torch's allocator.
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)

"""An exception in role code as data: what can be sent is sent, what can't becomes text."""

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
from colocate._system.imported import imported
from colocate._system.jobs import message_of
from colocate._system.tracebacks import NotRebuilt, frames_of_users, told
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

LOOKING = threading.RLock()
"""Held in a worker by who looks at the lane's frames, or at process groups, and so keeps what is there: though the lane
has left it, or drops it."""


def failed(
    error: BaseException, codec: Codec, definitions: Definitions, role: str | None, secondary: bool
) -> tuple[Failure, Any]:
    """Return the exception as data, and as a message body, if it can be sent."""
    unmade = None
    if isinstance(error, NotRebuilt):
        unmade, error = error.what, error.why
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    # An error of colocate's that role code has raised itself is the role's failure.
    by_role = any(not name.startswith("colocate.") or name.startswith("colocate.testing.") for name in names)
    ours = isinstance(error, CapabilityError | ChildDied) or (isinstance(error, OWN_WORDS) and not by_role)
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = message_of(error)
    needs_main = isinstance(error, ValueError | RuntimeError) and text.startswith(_NEEDS_MAIN)
    on_main = threading.current_thread() is threading.main_thread()
    ctx = current()
    apart = _IN_BACKGROUND if ctx is not None and ctx.role in ctx._background else _ON_THREADS
    thread = apart if needs_main and not on_main else None
    for hint in (imports.hint_for(error), thread):
        if hint is not None:
            note(error, hint)
    may_be_ours = isinstance(error, Consequence) or unmade is not None
    follows = may_be_ours and not frames_of_users(error)  # then there is nothing of a user's to see
    trace = "" if follows else told(error, _from_role_code(error.__traceback__), whole=False)
    found = Failure(name, text, trace, ours and unmade is None, secondary, role, unmade)
    return found, _sendable(error, codec, definitions)


def _sendable(error: BaseException, codec: Codec, definitions: Definitions) -> Any:
    """Return a message body with the exception, or None when it doesn't survive pickling: its text has to do then."""
    for name in ("__traceback__", "__context__", "__cause__"):  # frames of these hold tensors, files, process groups
        _ATTRIBUTES[name].__set__(error, None)  # its class may be frozen
    if codec.name == "reference":
        return error
    try:
        body = codec.pack(error)
        again = codec.unpack(body, None)
        definitions.tell(body)
    except BaseException:  # its class says how, and may raise what it likes
        return None
    return body if type(again) is type(error) else None


def note(error: BaseException, text: str) -> None:
    """Have an exception say something besides, if its class lets it."""
    with suppress(Exception):
        error.add_note(text)


def stack_of_role_code(thread: threading.Thread) -> list[str]:
    """A thread's stack as text, from the role's own code on, or all of it when there is none of that; [] at its end."""
    return role_code_in(frames_of(thread)[::-1])


def role_code_in(frames: Sequence[FrameType]) -> list[str]:
    """Frames, the outermost first, as text, from the role's own code on, or all when there is none of that."""
    return traceback.format_list(
        role_code_of(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames))
    )


def role_code_of(stack: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """A stack, the outermost frame first, from the role's own code on, or all of it when there is none of that.

    Without the frames of a debugger that has stopped the role's.
    """
    first = next((i for i, each in enumerate(stack) if not _is_machinery(each.filename)), 0)
    last = next((i for i, each in enumerate(stack) if i >= first and _DEBUGGER.search(each.filename)), len(stack))
    while first < last < len(stack) and _is_machinery(stack[last - 1].filename):
        last -= 1
    return stack[first:last]


def frames_of(thread: threading.Thread) -> list[FrameType]:
    """The frames of a thread, the innermost first; none when it has ended.

    A running thread's frames can be walked only while it stands still. Between two steps of Python code it may go on:
    then the stack breaks off, and what a generator that has been left calls its outer frame is any memory (CPython
    3.11). So one call of C takes them all. No Python code is run in it, and the GIL isn't let go.
    """
    frames: list[FrameType] = []
    innermost = map(itemgetter(thread.ident or 0), islice(iter(sys._current_frames, None), 1))
    outwards: Any = accumulate(chain(innermost, repeat("f_back")), getattr)  # each is an attribute of the one before
    # A collection would run Python code; up to CPython 3.11.7 and 3.12.1 one that starts in `_current_frames` can lock
    # the interpreter up (gh-106883).
    collecting = gc.isenabled()
    gc.disable()
    try:
        frames.extend(outwards)
    except KeyError:  # it has ended
        return []
    except AttributeError:  # of the None beyond the outermost; what came before that is in the list
        pass
    finally:
        if collecting:
            gc.enable()
    return frames[:-1]


def _is_machinery(file: str) -> bool:
    return file.startswith(_OWN) or file.endswith("colocate/_role/method_spec.py") or file in _RUNS_LANE


def _from_role_code(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of the worker itself, unless there are no others and the fault may be there.

    Where it ends in the call of role code, what was given doesn't fit: there is nothing to see.
    """
    found = trace
    # MethodSpec.call lies between the worker and the role.
    while found is not None and _is_machinery(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    if found is not None or trace is None:
        return found
    last = trace
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    return None if (Path(code.co_filename).name, code.co_name) in _CALLS_ROLES else trace


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, of a device or of the host."""
    if isinstance(error, MemoryError):
        return not isinstance(error, MemoryBudgetError)  # which says itself who has it
    torch = imported("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in message_of(error) for words in _NO_MEMORY)


_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "error: out of memory",  # of CUDA's own, which isn't torch's allocator's
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)

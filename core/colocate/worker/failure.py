"""An exception in role code as data: what can be sent is sent, what can't becomes text."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import attrs

from colocate._jobs import message_of

if TYPE_CHECKING:
    from colocate.worker.host import WorkerHost

_OWN = str(Path(__file__).parent)


@attrs.frozen
class Failure:
    """One failed call on one rank.

    Attributes:
        type: Qualified name of the exception's type.
        text: Its message.
        traceback: The traceback in the worker, from the role's own code on.
        host: Whether colocate raised it (arguments that don't fit, a result that can't be sent), not the role.
        secondary: Whether a peer's connection had been lost before: then another rank's failure is the cause.
        role: Name of the role.
    """

    type: str
    text: str
    traceback: str
    host: bool
    secondary: bool
    role: str | None

    def head(self) -> tuple[Any, ...]:
        """As plain data."""
        return attrs.astuple(self)


def describe(error: BaseException, *, role: str | None, host: bool, secondary: bool) -> Failure:
    """The exception as data."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = message_of(error)
    lines = traceback.format_exception(kind, error, _from_role_code(error.__traceback__))
    return Failure(name, text, "".join(lines), host, secondary, role)


def sendable(error: BaseException, host: WorkerHost) -> Any:
    """A message body with the exception, or None when it doesn't survive pickling (then its text has to do)."""
    bare = error.with_traceback(None)
    bare.__context__ = None  # frames that it refers to hold tensors, files and process groups
    bare.__cause__ = None
    codec = host.codec
    if codec.name == "reference":
        return bare
    try:
        body = codec.pack(bare)
        again = codec.unpack(body, None)
        host.definitions.tell(body)
    except BaseException:  # its class says how, and may raise what it likes
        return None
    return body if type(again) is type(bare) else None


def raised_by_role(error: BaseException) -> bool:
    """Whether role code raised one of colocate's own errors itself: then it is the role's failure."""
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        if not module.startswith("colocate.") or module.startswith("colocate.testing."):
            return True
        trace = trace.tb_next
    return False


def frame_of(thread: threading.Thread) -> FrameType | None:
    """What a thread is executing; None when it has ended."""
    # CPython up to 3.11.7 and 3.12.1 can lock itself up when a collection starts inside this call (gh-106883).
    collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread.ident or 0)
    finally:
        if collecting:
            gc.enable()


def stack_of_role_code(frame: FrameType) -> list[str]:
    """A thread's stack as text, from the role's own code on, or all of it when there is none of that."""
    frames = traceback.extract_stack(frame)
    first = next((i for i, each in enumerate(frames) if not _is_machinery(each.filename)), 0)
    return traceback.format_list(frames[first:])


def _is_machinery(file: str) -> bool:
    return file.startswith(_OWN) or file.endswith("colocate/_method.py") or file == threading.__file__


def _from_role_code(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of the worker itself, unless there are no others."""
    found = trace
    # MethodSpec.call lies between the worker and the role.
    while found is not None and _is_machinery(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    return found or trace

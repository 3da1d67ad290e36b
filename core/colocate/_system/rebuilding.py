"""What has come and can't be rebuilt: told as what it was, with what a class of the user's has raised as its cause."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from colocate._system.jobs import error_text
from colocate._system.lines import is_own_code
from colocate.errors import ColocateError


class NotRebuilt(ColocateError):
    """Something that has come can't be rebuilt; `what` it is, and `why`, which a class of the user's has raised."""

    what: str = ""
    why: BaseException


@contextlib.contextmanager
def rebuilding(what: str) -> Iterator[None]:
    """A block that unpacks something. An error of colocate's own is raised as it is.

    Raises:
        NotRebuilt: Something in it can't be rebuilt.
    """
    try:
        yield
    except ColocateError:
        raise
    except (Exception, SystemExit) as why:
        trace = why.__traceback__
        while trace is not None and is_own_code(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        error = NotRebuilt(f"{what} can't be rebuilt: {error_text(why)}")
        error.what, error.why = what, why.with_traceback(trace)
        raise error from why

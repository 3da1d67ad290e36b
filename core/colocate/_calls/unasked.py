"""Log call failures that no user has retrieved, when the call's handle is dropped or the group ends."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from colocate._calls.pending import PendingCall
from colocate._role.call import Call
from colocate._system.jobs import get_message
from colocate.errors import ClosedError, ColocateError, GroupRestarted

if TYPE_CHECKING:
    from colocate._worker_group.worker_group import WorkerGroup

_log = logging.getLogger("colocate")


class UnaskedLog:
    """The failures of one group's calls that no user has retrieved. Takes no lock."""

    def __init__(self, link: WorkerGroup) -> None:
        self._link = link
        # Failed calls with an existing handle, by which users may retrieve the error.
        self._failures: dict[PendingCall, weakref.ref[Call[Any]]] = {}
        self._closed: list[PendingCall] = []  # Calls that have failed because the group was closed.

    def add_failure(self, call: PendingCall, error: BaseException) -> None:
        """Record a failure that no user has retrieved so far."""
        if error is self._link.failure and not isinstance(error, GroupRestarted):
            return  # The group's own failure is reported elsewhere.
        if isinstance(error, ClosedError) and self._link.closed_by is not None:
            self._closed.append(call)
        elif call.handle is not None and (handle := call.handle()) is not None:
            note = self._link.services.printer.enqueue
            drop = weakref.ref(handle, lambda _: note(lambda: self._on_dropped(call, error)))
            self._failures.setdefault(call, drop)
        else:
            self._link.services.printer.call_soon(lambda: self._log_failure(call, error))

    def log_all(self) -> None:
        """Log all remaining failures at the end of the group."""
        closed, self._closed = self._closed, []
        if closed:
            self._link.services.printer.call_soon(lambda: self._log_closed(closed))
        for call in list(self._failures):
            if self._failures.pop(call, None) is not None and (error := call._error or call.failure) is not None:
                self._link.services.printer.call_soon(lambda call=call, error=error: self._log_failure(call, error))  # type: ignore[misc]

    # -- on the printer's thread

    def _on_dropped(self, call: PendingCall, error: BaseException) -> None:
        if self._failures.pop(call, None) is not None:
            self._log_failure(call, error)

    def _log_closed(self, calls: Sequence[PendingCall]) -> None:
        counts = Counter(f"{call.label}{_describe_line(call)}" for call in calls if call.handle is not None)
        if counts:
            text = "; ".join(label if count == 1 else f"{label} ({count} times)" for label, count in counts.items())
            _log.warning(
                "group %r was closed by %s while these submitted calls were unfinished, "
                "and their results were never asked for: %s",
                self._link.name,
                self._link.closed_by,
                text,
            )

    def _log_failure(self, call: PendingCall, error: BaseException) -> None:
        if call.handle is None:
            return
        call.handle = None
        if isinstance(error, ColocateError):
            if error._is_reported:  # Another call has already reported this error.
                return
            error._is_reported = True
        _log.error(
            "%s of group %r%s: the call has failed, and its result was never asked for: %s",
            call.label,
            self._link.name,
            _describe_line(call),
            get_message(error),
        )


def _describe_line(call: PendingCall) -> str:
    return "" if (line := call.called_at) is None else f", submitted at {line}"

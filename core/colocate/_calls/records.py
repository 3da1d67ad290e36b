"""What observers are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from colocate._calls.pending import PendingCall

CALL_FINISHED = "colocate_call_finished"


@attrs.frozen
class CallRecord:
    """One finished call.

    Attributes:
        group: Name of the group.
        role: Name of the role.
        method: Name of the method.
        ranks: The ranks that it ran on.
        submitted: When it was submitted, in seconds of time.time().
        finished: When its last answer came.
        spans: For each rank on which it went well: rank, start and end in the worker.
        kept: Whether the result stayed in the workers.
        error: The error's first line; None when it went well.
        ready: When it could have run, if its slots had been its own: it was submitted, and all kept results that it
            uses were there.
    """

    group: str
    role: str
    method: str
    ranks: tuple[int, ...]
    submitted: float
    finished: float
    spans: tuple[tuple[int, float, float], ...]
    kept: bool
    error: str | None
    ready: float


@attrs.frozen
class MoveRecord:
    """Memory of a role that has gone to sleep, or was woken, so that roles keep within a budget (`residency="swap"`).

    Attributes:
        group: Name of the group.
        role: Name of the role.
        rank: The rank.
        kind: "sleep" or "wake".
        nbytes: How many bytes.
        start: When it began, in seconds of time.time() on the worker.
        end: When it was done.
    """

    group: str
    role: str
    rank: int
    kind: str
    nbytes: int
    start: float
    end: float


def ended(group: str, call: PendingCall, error: BaseException | None) -> tuple[Any, ...]:
    """What is to be told of a call that has ended. It holds nothing that hangs on the call, such as its result."""
    words = None if error is None else str(error).partition("\n")[0]
    used = [end for use in call.uses for _, _, end in use._kept.call.spans]
    ready = max(call.submitted, *used) if used else call.submitted
    kept = call.keep is not None
    return group, call.role, call.method, call.ranks, call.spans, call.submitted, kept, words, ready


class Observers:
    """Plugins that are told what happens. Costs nothing while there is none."""

    def __init__(self) -> None:
        self._plugins: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._plugins)

    def add(self, plugin: Any) -> None:
        """Tell this plugin from now on."""
        self._plugins.append(plugin)

    def remove(self, plugin: Any) -> None:
        """Tell it no longer."""
        self._plugins.remove(plugin)

    def tell_call(
        self,
        group: str,
        role: str,
        method: str,
        ranks: Sequence[int],
        answers: Sequence[tuple[int, float, float]],
        submitted: float,
        kept: bool,
        error: str | None,
        ready: float,
    ) -> None:
        """Tell of a finished call, see `ended`."""
        # A rank on which it failed has answered, and nobody knows how long it took.
        spans = tuple(sorted([(ranks[index], start, end) for index, start, end in answers if end]))
        finished = max((end for _, _, end in spans), default=submitted)
        ran_on = tuple(sorted([ranks[index] for index, _, _ in answers]))
        self.tell(
            CALL_FINISHED,
            CallRecord(group, role, method, ran_on, submitted, finished, spans, kept, error, ready),
        )

    def tell(self, hook: str, *args: Any) -> None:
        """Call a hook of every plugin that has it. What one raises comes when all have been told."""
        errors: list[BaseException] = []
        for plugin in list(self._plugins):
            function = getattr(plugin, hook, None)
            if function is not None:
                try:
                    function(*args)
                except BaseException as error:
                    errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} observers raised in {hook}", errors)

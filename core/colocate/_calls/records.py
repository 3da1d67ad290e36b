"""What observers are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from colocate._calls.pending import PendingCall


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

    def tell_call(self, group: str, call: PendingCall) -> None:
        """Tell of a finished call."""
        # A rank on which it failed has answered, and nobody knows how long it took.
        spans = tuple(sorted([(call.ranks[index], start, end) for index, start, end in call.spans if end]))
        error = call._error
        record = CallRecord(
            group,
            call.role,
            call.method,
            tuple(sorted([call.ranks[index] for index, _, _ in call.spans])),
            call.submitted,
            max((end for _, _, end in spans), default=call.submitted),
            spans,
            call.keep is not None,
            None if error is None else str(error).partition("\n")[0],
        )
        self.tell("colocate_call_finished", record)

    def tell(self, hook: str, *args: Any) -> None:
        """Call a hook of every plugin that has it."""
        for plugin in list(self._plugins):
            function = getattr(plugin, hook, None)
            if function is not None:
                function(*args)

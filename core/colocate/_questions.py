"""What workers ask the driver: where another worker is, and what its peers have left on the board."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colocate._group import ColocatedGroup
    from colocate._worker import Worker

Tell = Callable[[Any, str | None], None]


class Questions:
    """Answers the workers of one group. The board holds values by key; who asks too early is told when it is there."""

    def __init__(self, group: ColocatedGroup) -> None:
        self._group = group
        self._values: dict[str, Any] = {}
        self._waiting: dict[str, list[Tell]] = {}

    def asked(self, worker: Worker, token: int, what: str, *details: Any) -> None:
        """A worker has asked something."""

        def tell(answer: Any, error: str | None = None) -> None:
            worker.send(("answer", token, answer, error))

        if what == "locate":
            self._locate(details[0], details[1], tell)
            return
        with self._group.order.lock:
            if what == "post":
                self._post(*details)
                tell(None)
            else:
                self._get(details[0], tell)

    def _post(self, key: str, value: Any) -> None:
        self._values[key] = value
        for tell in self._waiting.pop(key, []):
            tell(value, None)

    def _get(self, key: str, tell: Tell) -> None:
        if key in self._values:
            tell(self._values[key], None)
        else:
            # Nobody posts any more once the call has failed: then the hold ends the wait in the worker.
            self._waiting.setdefault(key, []).append(tell)

    def _locate(self, group: str, slot: int, tell: Tell) -> None:
        found = self._group.runtime.groups.get(group)
        if found is None or not found.alive:
            tell(None, f"group {group!r} is closed")
            return

        def located(address: str | None) -> None:
            tell(address, None if address is not None else f"worker {slot} of group {group!r} is gone")

        found.workforce.workers[slot].locate(located)

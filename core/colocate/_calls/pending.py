"""`PendingCall`: a call on its way, with what its group has heard of it so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from colocate._owned.dispatcher import Dispatcher
from colocate._owned.owned import forks
from colocate._protocol.taken import Taken
from colocate._role.call import Underway
from colocate._system.jobs import JobThread, Timer
from colocate._system.off_main import off_main
from colocate.errors import ColocateError, ForkedError

OnEnd: TypeAlias = Callable[["PendingCall", BaseException | None], None]


class Unsent(Protocol):
    """Where calls are that haven't been sent yet."""

    def refuse_wait(self, label: str, awaits: bool) -> None:
        """Raise when whoever waits for this call is who has to send it."""


class PendingCall(Underway):
    """A call on its way: what has come back from which rank."""

    __slots__ = (
        "__weakref__",
        "bodies",
        "canceller",
        "dispatcher",
        "forks",
        "keep",
        "left",
        "line",
        "method",
        "on_end",
        "pipeline",
        "places",
        "raised",
        "ranks",
        "remaining",
        "role",
        "rows",
        "sent",
        "seq",
        "spans",
        "submitted",
        "taken",
        "targets",
        "timer",
        "timers",
        "updates",
        "uses",
    )

    def __init__(
        self, label: str, role: str, method: str, targets: Sequence[int], ranks: Sequence[int] | None = None
    ) -> None:
        """Targets are slots of the group; ranks are those of the role on them (default: 0, 1, ...)."""
        super().__init__(label)
        self.seq = -1
        self.role = role
        self.method = method
        self.targets = targets
        self.ranks = range(len(targets)) if ranks is None else ranks
        self.places: dict[int, int] | None = None
        self.bodies: list[Any] = [None] * len(targets)
        self.rows: list[int | None] = [None] * len(targets)
        self.spans: list[tuple[int, float, float]] = []
        self.raised: list[int] = []  # of the spans' indices, those of ranks that have raised
        self.left: Sequence[tuple[int, float]] = ()  # those that ran it yet when it failed, and since when
        self.remaining = len(targets)
        self.updates: dict[int, int] = {}  # by slot, where there were any
        self.taken: dict[int, Sequence[Taken]] = {}  # by index, where there was something and somebody wants to know
        self.sent = 0  # bytes of its arguments, where somebody wants to know
        self.keep: int | None = None
        self.uses: Sequence[Any] = ()
        self.timer: Timer | None = None
        self.submitted = time.time()
        self.line: tuple[str, int] = ("", 0)
        self.on_end: OnEnd | None = None  # with the order's lock held, just before it is settled
        self.dispatcher: Dispatcher | None = None
        self.timers: JobThread | None = None
        self.canceller: Callable[[PendingCall], bool] | None = None
        self.pipeline: Unsent | None = None
        self.forks = forks()

    def cancel(self) -> bool:
        """Withdraw the call from all ranks, if none has begun it."""
        self._check_fork()
        self._check_unsent()
        canceller = self.canceller
        return canceller is not None and not self.done() and off_main(lambda: canceller(self))

    def _wait(self, timeout: float | None) -> None:
        self._check_fork()
        self._check_unsent()
        super()._wait(timeout)

    def _check_unsent(self, *, awaits: bool = False) -> None:
        if self.pipeline is not None:
            self.pipeline.refuse_wait(self.label, awaits)

    def _check_fork(self) -> None:
        if self.forks != forks():
            raise ForkedError(
                f"{self.label} was submitted by the process that forked this one; its result is told there"
            )

    def _collect(self) -> None:
        super()._collect()
        if self.keep is None:
            self.bodies = []

    def _joined(self, raw: Any, joiner: Callable[..., Any] | None) -> Any:
        return None if joiner is None else joiner(self, raw)

    def _then(self, callback: Callable[[Any], object], own: bool = True) -> None:
        self._check_fork()
        self._callbacks.append((callback, own))
        if self.done():
            off_main(self._run_callbacks)

    def _dispatch(self, callback: Callable[[Any], object], own: bool) -> None:
        thread = self.timers if own else self.dispatcher
        if thread is None:
            callback(self)
        else:
            thread.soon(partial(callback, self))

    def index_of(self, slot: int) -> int:
        """The index among its ranks of the rank on a slot."""
        targets = self.targets
        if slot < len(targets) and targets[slot] == slot:
            return slot
        if self.places is None:
            self.places = {target: index for index, target in enumerate(targets)}
        return self.places[slot]

    def rank_of(self, slot: int) -> int:
        """The rank on a slot."""
        return self.ranks[self.index_of(slot)]

    def poison(self) -> ColocateError | None:
        """The failure of a kept call whose resident this one uses: there is no other reason to look for."""
        errors = (use._kept.call._error for use in self.uses)
        return next((error for error in errors if isinstance(error, ColocateError)), None)

    def missing(self) -> list[int]:
        """The slots that haven't answered."""
        answered = {rank for rank, _, _ in self.spans}
        return [slot for index, slot in enumerate(self.targets) if index not in answered]

"""Define `PendingCall`, a call in progress with the answers so far."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from colocate._protocol.taken import Receipt
from colocate._role.call import Call, CallFuture
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._signals.guard import calls_users_code
from colocate._system.jobs import Timer, format_error
from colocate._system.lines import format_line, get_shown_file
from colocate._system.tracebacks import NotRebuilt, rebuilding
from colocate._values.mesh import Ranks
from colocate.errors import ColocateError, ForkedError, SerializationError

if TYPE_CHECKING:
    from colocate._worker_group.worker_group import WorkerGroup

OnEnd: TypeAlias = Callable[["PendingCall", BaseException | None], None]


class UnsentCalls:
    """The owner of calls that aren't sent yet. Residents of such calls are unusable until the calls are sent."""

    def check_can_wait(self, label: str, awaits: bool) -> None:
        """Raise if the waiting code itself must send the call. Here a framework thread sends it, so do nothing."""


class PendingCall(CallFuture):
    """A call in progress, with the answers of ranks so far.

    Attributes:
        seq: Position in the group's order; -1 before it has one.
        moved: Time of the submission, or of the last progress.
        targets: The slots that run the call.
        ranks: The role's ranks on these slots.
        bodies: The results, or the sizes of kept results; in the order of `targets`, like `rows`.
        spans: Index, start and end of each rank that has answered.
        at: Code and line of the user's call, or a replacement for these.
        link: The group, once the call is about to be sent.
        info: The role that runs the call, and `spec` the method: how the results become the value.
        partition: The rows of each rank, for scattered rows chosen by cost.
        sent: Bytes of the arguments, if observed.
        raised: Indices of ranks that have raised.
        stragglers: Indices of ranks that were still running the call when it failed, and the times of their begin.
        parts: Reports of features, by feature name.
        received: Bytes received before the results.
        receipts: Notes on residents that ranks have received, by index, if observed.
        on_end: Callback under the order's lock, just before the call is settled.
        lane: The background role of the call's order; "" for the group's order.
        is_for_all: Whether the call has a place in the orders of all background roles, too.
        partner: A call of another group on which this call's end depends, if there is one.
        failure: The error that has ended the call, if its ranks answer as usual.
    """

    link: WorkerGroup | None = None
    info: RoleInfo | None = None
    spec: MethodSpec | None = None
    keep: int | None = None
    uses: Sequence[Any] = ()
    timer: Timer | None = None
    partition: Sequence[Sequence[int]] | None = None
    on_end: OnEnd | None = None
    at: tuple[CodeType | str, int] = ("", 0)
    sent = 0
    received = 0
    lane = ""
    is_for_all = False
    partner: PendingCall | None = None
    failure: ColocateError | None = None
    raised: Sequence[int] = ()
    stragglers: Sequence[tuple[int, float]] = ()
    parts: Mapping[str, Any] = MappingProxyType({})
    receipts: Mapping[int, Sequence[Receipt]] = MappingProxyType({})
    _places: dict[int, int] | None = None

    def __init__(
        self, label: str, role: str, method: str, targets: Sequence[int], ranks: Sequence[int] | None = None
    ) -> None:
        """Args: targets: Slots of the group. ranks: The role's ranks on these slots (default: 0, 1, ...)."""
        super().__init__(label)
        # Set here, so that `CallOrder.enqueue_call` needn't allocate.
        self.seq = -1
        self.unsent: UnsentCalls | None = None
        self.role = role
        self.method = method
        self.targets = targets
        self.remaining = count = len(targets)
        self.ranks = range(count) if ranks is None else ranks
        self.bodies: list[Any] = [None] * count
        self.rows: list[int | None] = [None] * count
        self.spans: list[tuple[int, float, float]] = []
        self.submitted = self.moved = time.time()

    @property
    def line(self) -> tuple[str, int]:
        """The file and line of the user's call."""
        code, number = self.at
        return (code if isinstance(code, str) else get_shown_file(code), number)

    @property
    def called_at(self) -> str | None:
        """The file and line of the user's call, for errors; None for a call without a line, such as a group's start."""
        line = self.line
        return format_line(line) if line[0] else None

    def cancel(self) -> bool:
        self._check_fork()
        self._check_unsent()
        link = self.link
        return link is not None and not self.done() and link.order.cancel_call(self)

    def _wait(self, timeout: float | None) -> None:
        if self.unsent is not None:
            self.unsent.check_can_wait(self.label, awaits=False)
        self._check_fork()
        if not self.is_set:
            if blocked_calls:
                self.check_deadlock()
            super()._wait(timeout)

    def _check_unsent(self, *, awaits: bool = False) -> None:
        if self.unsent is not None:
            self.unsent.check_can_wait(self.label, awaits)

    def _check_wait(self, *, awaits: bool = False) -> None:
        super()._check_wait(awaits=awaits)
        if blocked_calls and not self.is_set:
            self.check_deadlock(awaits)

    def check_deadlock(self, awaits: bool = False) -> None:
        """Raise if a wait here would never end, because an earlier call only ends when this thread or task acts."""
        for other, refuse in list(blocked_calls.items()):
            refuse(other, self, awaits)

    def _check_fork(self) -> None:
        if self.link is not None and self.link.is_forked:
            raise ForkedError(
                f"{self.label} was submitted by the process that forked this one; its result is told there"
            )

    def _collect(self) -> None:
        super()._collect()
        if self.keep is None:
            self.bodies = []

    def _attach_handle(self, handle: Call[Any]) -> None:
        self.handle = weakref.ref(handle)
        # The handle is set before this check, so that this thread or the failing thread reports the failure.
        if self.is_set:
            self._report_failure()

    def _set_error(self, error: BaseException) -> bool:
        return super()._set_error(error) and self._report_failure()

    def _report_failure(self) -> bool:
        error = self._error or self.failure
        if self.handle is not None and self.link is not None and error is not None:
            self.link.unasked.add_failure(self, error)
        return True

    @calls_users_code
    def _join_results(self, raw: Sequence[Any]) -> Any:
        info, spec, link = self.info, self.spec, self.link
        if self.keep is not None or info is None or spec is None or link is None:
            return None
        results = [
            None if body is None else unpack_result(link, self, slot, body)
            for slot, body in zip(self.targets, raw, strict=True)
        ]
        ranks = info.ranks
        if self.targets is not info.slots:
            ranks = Ranks(ranks.world_size, ranks.meshes, self.rows, None, self.ranks)
        elif self.rows.count(None) != len(results):
            ranks = Ranks(ranks.world_size, ranks.meshes, self.rows, partition=self.partition)
        return spec.collect.join(results, ranks)

    def _add_callback(self, callback: Callable[[Any], object], own: bool = True) -> None:
        self._check_fork()
        self._callbacks.append((callback, own))
        if self.done():
            self._run_callbacks()

    def _dispatch(self, callback: Callable[[Any], object], own: bool) -> None:
        if self.link is None:
            callback(self)
        else:
            services = self.link.services
            (services.timers if own else services.dispatcher).call_soon(partial(callback, self))

    def index_of(self, slot: int) -> int:
        targets = self.targets
        if slot < len(targets) and targets[slot] == slot:
            return slot
        if self._places is None:
            self._places = {target: index for index, target in enumerate(targets)}
        return self._places[slot]

    def rank_of(self, slot: int) -> int:
        return self.ranks[self.index_of(slot)]

    def find_poison(self) -> ColocateError | None:
        """Return the error of a used resident's failed call, if any. This error replaces the call's own error."""
        errors = (use._kept.call._error for use in self.uses)
        return next((error for error in errors if isinstance(error, ColocateError)), None)

    def missing_slots(self) -> list[int]:
        """Return the slots that haven't answered."""
        answered = {rank for rank, _, _ in self.spans}
        return [slot for index, slot in enumerate(self.targets) if index not in answered]


blocked_calls: dict[PendingCall, Callable[[PendingCall, PendingCall, bool], None]] = {}
"""Calls that only end when a user acts, each with a function that raises if this user waits for a later call."""


def unpack_result(link: WorkerGroup, call: PendingCall, slot: int, body: Any) -> Any:
    """Unpack a call's result from a rank.

    Raises:
        SerializationError: The result can't be rebuilt here.
    """
    if body is None:  # Most results are None.
        return None
    try:
        with rebuilding("it"):
            return link.unpack(body)
    except NotRebuilt as error:
        part = "" if error.subject == "it" else f"{error.subject}: "
        raise SerializationError(
            f"the result of {call.label} on rank {call.rank_of(slot)} of group {link.name!r} can't be rebuilt on the "
            f"driver: {part}{format_error(error.cause)}",
            argument="result",
            group=link.name,
            role=call.role or None,
            method=call.method,
            rank=call.rank_of(slot),
            node=link.node(slot),
            called_at=call.called_at,
        ) from error.cause

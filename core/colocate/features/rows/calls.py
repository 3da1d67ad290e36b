"""The driver's side of calls with rows that end one by one: assigns rows to ranks, and records results.

Such a call has one position in the order of the group's calls. For a method with `rows=`, a rank gets a row when the
rank has a free place. Rows that a batched method yields arrive while there is credit. `tasks.py` is the worker's side.
"""

from __future__ import annotations

import abc
import contextlib
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, cast

import attrs

from colocate._calls.failures import failure_error
from colocate._calls.handles import Consumer, Reference
from colocate._calls.order import CallOrder, Stacks
from colocate._calls.pending import PendingCall, unpack_result
from colocate._calls.sending import prepare_draft, send_now
from colocate._calls.view import with_references
from colocate._definitions.packed import copy_buffers, count_packed_bytes
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._system.jobs import format_error
from colocate._system.numbers import format_count
from colocate._values.dispatch import plan_call
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import CallCancelled, ClosedError, ColocateError, RoleError, SerializationError
from colocate.features.rows.messages import AHEAD, NoMoreRows, ReadRows, Row, RowEnded
from colocate.features.rows.row_stream import OnError

_AHEAD_FACTOR = 2  # Limit on rows that are assigned but unread, as a multiple of the rows that can run at once.


class RowFlow:
    """The assignment of rows to slots that take rows one by one. Uses no threads or clocks.

    Attributes:
        running: The slot of each running row.
        tries_left: The remaining tries of each row.
    """

    def __init__(
        self,
        rows: Iterable[int],
        slots: Sequence[int],
        places: int,
        ahead: int | None = None,
        keys: Mapping[int, Hashable] | None = None,
        tries: MutableMapping[int, int] | None = None,
    ) -> None:
        """Start without any assigned row.

        Args:
            rows: The waiting rows, in order.
            slots: The slots.
            places: The number of rows that run at once on each slot.
            ahead: The limit on rows that are assigned and unread; None for no limit.
            keys: The key of each row. Rows with equal keys run on one slot. None for no keys: each row runs on the slot
                with most free places.
            tries: The number of tries of each row; one for rows that aren't listed.
        """
        self.running: dict[int, int] = {}
        self.tries_left = {} if tries is None else tries
        self._waiting = deque(rows)
        self._retry_queues: dict[int, deque[int]] = {
            slot: deque() for slot in slots
        }  # Rows that must run on a given slot, by slot.
        self._free_places = dict.fromkeys(slots, places)
        self._most_out = ahead
        self._out_count = 0
        self._keys = keys
        self._homes: dict[Hashable, int] = {}
        # Slots where rows fail at once, because a child process that the role needs has ended.
        self._bereft_slots: set[int] = set()

    @property
    def has_waiting(self) -> bool:
        """Whether any row waits for a slot."""
        return bool(self._waiting) or any(self._retry_queues.values())

    @property
    def is_stalled(self) -> bool:
        """Whether rows can't begin until the driver has read other rows."""
        return self._most_out is not None and self._out_count >= self._most_out and self.has_waiting

    def assign_rows(self) -> list[tuple[int, int]]:
        """Assign rows that can begin now, and return slot and row of each assignment."""
        assignments: list[tuple[int, int]] = []
        while (self._most_out is None or self._out_count < self._most_out) and (
            assignment := self._next_row()
        ) is not None:
            slot, row = assignment
            self._free_places[slot] -= 1
            self._out_count += 1
            self.running[row] = slot
            self.tries_left[row] = self.tries_left.get(row, 1) - 1
            assignments.append(assignment)
        return assignments

    def _next_row(self) -> tuple[int, int] | None:
        open_slots = sorted(
            (slot for slot in self._usable_slots() if self._free_places[slot]),
            key=lambda slot: -self._free_places[slot],
        )
        for slot in open_slots:
            if row_queue := self._retry_queues[slot]:
                return slot, row_queue.popleft()
        while open_slots and self._waiting:
            row = self._waiting.popleft()
            if self._keys is None:
                return open_slots[0], row
            home = self._homes.setdefault(self._keys[row], open_slots[0])
            if self._free_places[home]:
                return home, row
            self._retry_queues[home].append(row)
        return None

    def _usable_slots(self) -> Collection[int]:
        """Return the slots where rows don't fail at once.

        If there is none, return all slots, so that rows fail there with the reason.
        """
        return [slot for slot in self._free_places if slot not in self._bereft_slots] or self._free_places

    def on_row_ended(self, row: int, again: bool = False, is_bereft: bool = False) -> None:
        """Record that a row has ended.

        Args:
            row: The row.
            again: Whether the row gets another try, on another slot if there is one.
            is_bereft: Whether other rows fail on this slot, too. They run on other slots until a row ends on this slot
                without this flag.
        """
        slot = self.running.pop(row)
        self._free_places[slot] += 1
        (self._bereft_slots.add if is_bereft else self._bereft_slots.discard)(slot)
        if again:
            self._out_count -= 1
            other_slots = [other for other in self._usable_slots() if other != slot] or [slot]
            self._retry_queues[
                max(other_slots, key=lambda other: self._free_places[other] - len(self._retry_queues[other]))
            ].append(row)
        for bereft_slot in self._bereft_slots:
            self._waiting.extendleft(reversed(self._retry_queues[bereft_slot]))
            self._retry_queues[bereft_slot].clear()
        if self._bereft_slots:
            self._homes = {key: home for key, home in self._homes.items() if home not in self._bereft_slots}

    def on_row_read(self) -> None:
        """Record that the driver has read an ended row."""
        self._out_count -= 1

    def stop_assigning(self) -> None:
        """Remove all waiting rows."""
        self._waiting.clear()
        for row_queue in self._retry_queues.values():
            row_queue.clear()


class RowsCall(PendingCall, abc.ABC):
    """A call with rows that end one by one.

    Attributes:
        on_error: The effect of a row's error: "raise" or "return".
        count: The number of rows.
        ends: The outcome of each ended row, by index: the slot, and the packed value or an error.
        arrivals: Called with the call and the index of each ended row, on a framework thread, with the order's lock
            held.
        is_streamed: Whether rows are read one by one. Otherwise the call's value has all rows.
        order: The order of the group's calls.
    """

    _is_cancelled = True  # Whether the awaits of ranks are cancelled when the rows are withdrawn.

    def __init__(
        self,
        label: str,
        role: str,
        method: str,
        targets: Sequence[int],
        ranks: Sequence[int],
        order: CallOrder,
        on_error: OnError,
        rows: int,
    ) -> None:
        """Prepare the call. `order` is the order of the group's calls; `rows` is the number of rows."""
        super().__init__(label, role, method, targets, ranks)
        self.on_error = on_error
        self.count = rows
        self.ends: dict[int, tuple[int, Any, ColocateError | None]] = {}
        self.arrivals: Callable[[RowsCall, int], object] = lambda call, row: None
        self.is_streamed = False
        self.order, self._lock = order, order.lock
        self._read_rows: deque[int] = deque()  # The slots of rows that were read since the last report to the ranks.
        self._is_withdrawn = False  # The call may be withdrawn even before the driver has sent the call.
        self._is_over = False  # Whether `NoMoreRows` was sent.
        # Early rows, which ended before their turn, by turn number.
        self._early_rows: dict[int, tuple[int, RowEnded, Any]] = {}
        self._turn = 0  # The number of the next turn in the order of results.
        self._is_telling = False  # Whether a report of read rows is scheduled.

    # -- with the order's lock held

    def begin_rows(self) -> None:
        """Start to send rows, after the call itself was sent."""
        if self._is_withdrawn:
            self._end_rows(withdrawn=True)
        else:
            self._begin_rows()

    @abc.abstractmethod
    def _begin_rows(self) -> None:
        """Send a first set of rows to the ranks."""

    def take_row(self, slot: int, told: RowEnded, body: Any) -> list[tuple[int, RowEnded]]:
        """Record an ended row, at once or when its turn comes. Return slot and message of each row recorded now."""
        if told.turn is None:
            self.on_row_ended(slot, told, body)
            return [(slot, told)]
        row_messages = []
        self._early_rows[told.turn] = slot, told, body
        while self._early_rows and (self._turn in self._early_rows or self._has_no_other(len(self._early_rows))):
            turn = min(self._early_rows)
            self._turn = turn + 1
            slot, told, body = self._early_rows.pop(turn)
            self.on_row_ended(slot, told, body)
            row_messages.append((slot, told))
        return row_messages

    def _has_no_other(self, early: int) -> bool:
        """Return whether no row can end except the `early` rows, which wait for their turn."""
        return False

    @abc.abstractmethod
    def on_row_ended(self, slot: int, told: RowEnded, body: Any) -> None:
        """Handle the end of a row on a rank."""

    def _note_row(self, row: int, slot: int, body: Any, error: ColocateError | None = None) -> None:
        self.ends[row] = slot, body, error
        self.moved = time.time()
        self.received += count_packed_bytes(body)
        self.arrivals(self, row)

    def _end_rows(self, withdrawn: bool) -> None:
        if withdrawn or not self._is_over:
            self._is_over = True
            self.group.send(self.targets, NoMoreRows(self.seq, withdrawn))
            if withdrawn and self._is_cancelled:
                self._give_hold_time()

    def _give_hold_time(self) -> None:
        """Check after a grace period whether the ranks have ended the call."""
        self.group.services.timers.call_later(self.group.grace, partial(_watch_end, weakref.ref(self)))

    def fail_if_running(self, stacks: Stacks) -> None:
        """Fail the group if a rank still runs the withdrawn call."""
        with self._lock:
            if self.done():
                return
            # Ranks that still wait for an earlier call or a hold notice the withdrawal after the wait.
            stuck = [slot for slot in self.missing_slots() if self.seq in self.order.stacks.ran.get(slot, ())]
            if (
                stuck
                and not self.order.is_held(self.lane)
                and not self.group.paused_seconds(time.time() - self.group.grace)
            ):
                self.group.fail_group(still_running_error(self.group, self, stuck[0], stacks.describe_slot(stuck[0])))
            else:
                self._give_hold_time()

    @property
    def group(self) -> WorkerGroup:
        """The call's group. Known once the call has been sent."""
        return cast("WorkerGroup", self.link)

    # -- on any thread

    def withdraw(self) -> None:
        """Withdraw the call, so that no further rows begin and running rows are cancelled."""
        with self._lock:
            self._is_withdrawn = True
            if self.seq >= 0 and not self.done():
                self._end_rows(withdrawn=True)

    def note_read(self, row: int) -> None:
        """Record that the driver has read a row for the first time."""
        if (end := self.ends.pop(row, None)) is not None:
            self._read_rows.append(end[0])
        self.schedule_read()

    def schedule_read(self) -> None:
        """Schedule a report of read rows to the ranks. The report covers all rows that are read before it is sent."""
        if self._is_telling or not self._reports_read():
            return
        self._is_telling = True
        self.group.services.timers.call_soon(self._count_read)

    @abc.abstractmethod
    def _reports_read(self) -> bool:
        """Return whether the ranks need a report of read rows."""

    def _count_read(self) -> None:
        self._is_telling = False  # This precedes the report, so that later reads schedule another report.
        with self._lock:
            if not self.done():
                self._send_read()

    @abc.abstractmethod
    def _send_read(self) -> None:
        """Report to the ranks which rows were read."""

    def row_value(self, row: int) -> Any:
        """Return the value of an ended row; with on_error="return", possibly the row's error.

        Raises:
            ColocateError: The row's error.
        """
        slot, body, error = self.ends[row]
        if error is None:
            try:
                return unpack_result(self.group, self, slot, body)
            except SerializationError as why:
                error = why
                error.row = row
        if self.on_error == "return":
            return error
        raise error

    def _set_result(self, raw: Any) -> bool:
        return super()._set_result(raw) and self._report_failure()

    def _join_results(self, raw: Sequence[Any]) -> Any:
        if self.is_streamed:
            return None
        if self.failure is not None:
            raise self.failure
        return [self._of_all(row) for row in range(self.count)]

    def _of_all(self, row: int) -> Any:
        if row not in self.ends:
            raise left_out_error(self, self.count - len(self.ends))
        return self.row_value(row)


class GivenRows(RowsCall):
    """The call of a method with `rows=`. The driver sends the rows to ranks one by one."""

    def __init__(
        self,
        *args: Any,
        flow: RowFlow,
        bodies: MutableMapping[int, Any],
        take_number: Callable[[], int],
    ) -> None:
        """Prepare the call.

        Args:
            args: As for `RowsCall`.
            flow: The assignment of rows to ranks.
            bodies: The packed rows, by index. Ended rows are removed.
            take_number: Returns the call's number among the calls of the method. Called once, when the call begins.
        """
        super().__init__(*args)
        self._flow = flow
        self._packed = bodies
        self._take_number = take_number
        self._number = 0

    def _begin_rows(self) -> None:
        self._number = self._take_number()
        self._give()

    def copy_rows(self) -> None:
        """Copy rows that may be sent later, so that the caller may then overwrite the original buffers.

        A sent row is in a message already, and is copied only if a retry is possible. The order's lock is released
        after each row, because a copy may take long.
        """
        with self._lock:
            waiting = list(self._packed.items())
        for row, body in waiting:
            if self._flow.tries_left.get(row, 1) and (copy := copy_buffers(body)) is not body:
                with self._lock:
                    if row in self._packed:
                        self._packed[row] = copy

    def on_row_ended(self, slot: int, told: RowEnded, body: Any) -> None:
        """Record the end of a row, and send further rows."""
        row, failure = told.row, told.failure
        again = failure is not None and self._flow.tries_left[row] > 0 and not self._is_over
        self._flow.on_row_ended(row, again, told.is_bereft)
        if failure is None:
            self._note_row(row, slot, body)
        elif not again:
            self._note_row(row, slot, None, failure_error(self.group, self, slot, failure, body, row))
        self._give()

    def _has_no_other(self, early: int) -> bool:
        return early >= len(self._flow.running)

    def _note_row(self, row: int, slot: int, body: Any, error: ColocateError | None = None) -> None:
        self._packed.pop(row, None)
        if error is not None and self.on_error == "raise" and self.failure is None:
            self.failure = error
            self._end_rows(withdrawn=True)
        super()._note_row(row, slot, body, error)

    def _end_rows(self, withdrawn: bool) -> None:
        if withdrawn:
            self._flow.stop_assigning()
        super()._end_rows(withdrawn)

    def _give(self) -> None:
        while self._read_rows:
            self._read_rows.popleft()
            self._flow.on_row_read()
        while assignments := self._flow.assign_rows():
            for slot, row in assignments:
                try:
                    self.group.send([slot], Row(self.seq, row, self._number), self._packed[row])
                except Exception as error:  # The row can't be sent, for example without a free descriptor.
                    self._flow.on_row_ended(row)
                    words = f"{self.label}, row {row}: it can't be sent: {format_error(error)}"
                    self._note_row(row, slot, None, SerializationError(words, method=self.method, row=row))
        may_come_again = any(self._flow.tries_left[row] for row in self._flow.running)
        if not (self._is_over or self._flow.has_waiting or may_come_again):
            self._end_rows(withdrawn=False)

    def _reports_read(self) -> bool:
        return self._flow.is_stalled

    def _send_read(self) -> None:
        self._give()


class YieldedRows(RowsCall):
    """The call of a batched method. Each rank yields the rows of the rank's part of the batch."""

    def __init__(self, *args: Any, places: Mapping[int, Sequence[int]], is_ahead: bool, is_cancelled: bool) -> None:
        """Prepare the call.

        Args:
            args: As for `RowsCall`.
            places: The indices of the rows of each slot whose results count.
            is_ahead: Whether rows are read one by one.
            is_cancelled: Whether the awaits of ranks are cancelled when the rows are withdrawn.
        """
        super().__init__(*args)
        self._is_cancelled = is_cancelled
        self._rows_of = places
        self._is_ahead = is_ahead

    def _begin_rows(self) -> None:
        if not self._is_ahead:  # Nobody reads single rows, so each rank may send all rows.
            for slot, rows in self._rows_of.items():
                self.group.send([slot], ReadRows(self.seq, len(rows)))

    def on_row_ended(self, slot: int, told: RowEnded, body: Any) -> None:
        """Record the end of a row."""
        self._note_row(self._rows_of[slot][told.row], slot, body)

    def _reports_read(self) -> bool:
        return self._is_ahead and len(self._read_rows) >= AHEAD // 2

    def _send_read(self) -> None:
        counts: Counter[int] = Counter()
        with contextlib.suppress(IndexError):
            while True:
                counts[self._read_rows.popleft()] += 1
        for slot, count in counts.items():
            self.group.send([slot], ReadRows(self.seq, count))


def left_out_error(call: RowsCall, count: int) -> ColocateError:
    """Return the error for rows without a result, after the call was cancelled or the group was closed."""
    rows, closed_by = format_count(count, "row"), call.group.closed_by
    if closed_by is not None:
        words = f"group {call.group.name!r} was closed by {closed_by} before {call.label} had ended {rows}"
        return ClosedError(words, closed_by=closed_by)
    return CallCancelled(
        f"{call.label} was cancelled while it ran (ctx.cancelled), and has ended without {rows}", method=call.method
    )


def still_running_error(link: WorkerGroup, call: PendingCall, slot: int, stack: str) -> ColocateError:
    """Return the error of a group in which a rank still runs withdrawn rows after the grace period."""
    return RoleError(
        f"group {link.name!r} failed: {call.label} did not end on slot {slot} (node {link.node(slot)}) within "
        f"{link.grace:g} s after nobody waited for its rows any more, as its stream was left or a row had failed. What "
        "it awaits was cancelled: it has to let asyncio.CancelledError out (`except Exception` does, `except "
        f"BaseException` doesn't). It is here:\n{stack}",
        group=link.name,
        role=call.role,
        method=call.method,
        rank=call.rank_of(slot),
        node=link.node(slot),
        called_at=call.called_at,
    )


def _watch_end(ref: weakref.ref[RowsCall]) -> None:
    if (call := ref()) is not None and not call.done():
        call.order.stacks.ask_stacks(call.missing_slots(), call.fail_if_running)


class CallNumbers:
    """Counters that number a group's calls of each method with `rows=`.

    Random numbers of rows depend on the call's number.

    Checkpoints include the counts, so that a restored run draws the same random numbers. Callers hold the order's lock.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def next_number(self, label: str, known: int | None) -> int:
        """Return the number of a method's next call. A call that continues after a restart keeps the `known` number."""
        number = self._counts.get(label, 0) if known is None else known
        self.raise_counts({label: number + 1})
        return number

    def raise_counts(self, counts: Mapping[str, int]) -> None:
        """Raise the methods' numbers of calls to at least the given counts."""
        self._counts |= {label: max(count, self._counts.get(label, 0)) for label, count in counts.items()}

    def counts(self) -> dict[str, int]:
        """Return the number of calls of each method, by label."""
        return dict(self._counts)

    def reset_counts(self, counts: Mapping[str, int]) -> None:
        """Replace the counts of all methods."""
        self._counts = dict(counts)


@attrs.frozen
class RowOptions:
    """The options of a call with rows; see `RowCall.options`."""

    timeout: float | None = None
    ranks: Sequence[int] | None = None
    on_error: OnError = "raise"
    retry: int = 0
    sticky: Callable[[Any], object] | None = None


@attrs.define(eq=False)
class RowsRequest:
    """A prepared request for rows. Sends a call, and further calls after restarts of the group."""

    worker_group: WorkerGroup
    role: RoleInfo
    spec: MethodSpec
    label: str
    options: RowOptions
    consumer: Consumer
    arguments: Mapping[str, Any]  # All arguments except the rows, if rows are sent one by one.
    count: int = 0  # Number of rows. For batched methods, known only after the split by rank.
    bodies: dict[int, Any] = attrs.field(factory=dict)
    keys: Mapping[int, Hashable] | None = None
    tries: dict[int, int] = attrs.field(factory=dict)
    line: Any = None  # The user's line of code that made the request.
    number: int | None = None  # The call's number among the method's calls. A restart keeps this number.
    shared: Any = None  # The packed arguments without rows, stored for a call after a restart.
    shared_uses: Sequence[Reference] = ()

    def send_call(
        self,
        rows: Sequence[int],
        is_ahead: bool,
        prepare: Callable[[RowsCall], object] = lambda call: None,
        is_again: bool = False,
    ) -> RowsCall:
        """Send a call for the given rows, and return the call.

        Args:
            rows: Indices of the rows to send one by one.
            is_ahead: Whether rows are read one by one, with a limit on unread rows.
            prepare: Called with the call before it is sent.
            is_again: Whether this call follows a call that ended with a restart of the group.
        """
        worker_group, role, spec = self.worker_group, self.role, self.spec
        uses: list[Reference] = []
        # A repeated call uses the arguments packed earlier, because the caller may have changed the originals since.
        if is_again:
            arguments, uses = {}, [use.bind_consumer(self.consumer) for use in self.shared_uses]
        else:
            arguments = with_references(dict(self.arguments), worker_group, self.consumer, self.label, uses)
        planned = plan_call(spec.dispatch, arguments, role.ranks, self.options.ranks)
        targets: Sequence[int] = role.slots
        if not isinstance(planned.targets, range):
            targets = [targets[rank] for rank in planned.targets]
        order = worker_group.order
        where = self.label, role.name, spec.name, targets, planned.targets, order, self.options.on_error
        call: RowsCall
        if spec.rows is not None:
            most_ahead = _AHEAD_FACTOR * spec.concurrency * len(targets) if is_ahead else None
            flow = RowFlow(rows, targets, spec.concurrency, most_ahead, self.keys, self.tries)
            call = GivenRows(*where, self.count, flow=flow, bodies=self.bodies, take_number=self._take_number)
            planned = attrs.evolve(planned, valid=[len(rows)] * len(targets))  # Each rank may get any of the rows.
        else:
            places: dict[int, Sequence[int]] = {}
            self.count = 0
            for rank in spec.collect.sources(role.ranks):
                size = planned.valid[rank] or 0
                rank_rows = (
                    range(self.count, self.count + size) if planned.partition is None else planned.partition[rank]
                )
                places[role.slots[rank]] = rank_rows
                self.count += size
            # Awaits are cancelled only if every rank yields rows. Otherwise a rank could leave a collective step early.
            is_cancelled = spec.is_async and len(places) == len(role.slots)
            call = YieldedRows(*where, self.count, places=places, is_ahead=is_ahead, is_cancelled=is_cancelled)
            call.partition = planned.partition
        prepare(call)
        packed = [self.shared] * len(targets) if is_again else None
        draft = prepare_draft(worker_group, call, role, spec, planned, uses, self.options.timeout, packed)
        if spec.rows is not None and worker_group.restarts.limit and not is_again:
            self.shared, self.shared_uses = copy_buffers(draft.bodies[0]), uses
        self.line = call.at = self.line or call.at
        if worker_group.services.observers and not worker_group.services.executor.in_process:
            call.sent += sum(count_packed_bytes(self.bodies[row]) for row in rows) if spec.rows is not None else 0
        send_now(draft, call.begin_rows, is_again)
        if isinstance(call, GivenRows) and not is_again:
            call.copy_rows()
        return call

    def _take_number(self) -> int:
        """Return the number of the call: a new one, or the known one after a restart.

        Callers hold the order's lock.
        """
        numbers: CallNumbers = self.worker_group.get_part("rows").numbers  # type: ignore[attr-defined]
        self.number = numbers.next_number(self.label, self.number)
        return self.number

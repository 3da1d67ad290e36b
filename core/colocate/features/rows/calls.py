"""Rows of a call that end one by one, the driver's half: which rank gets which, and what has come of them.

Such a call has one place in the order of its group. Ranks are given rows of a method with `rows=` as they have places;
what a batched method yields comes while there is credit. `tasks.py` has the other half.
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
from colocate._calls.pending import PendingCall, result_of
from colocate._calls.sending import ready, send_now
from colocate._calls.view import with_references
from colocate._definitions.packed import owned, packed_bytes
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._system.jobs import error_text
from colocate._system.numbers import plural
from colocate._values.dispatch import plan
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import CallCancelled, ClosedError, ColocateError, RoleError, SerializationError
from colocate.features.rows.messages import AHEAD, NoMoreRows, ReadRows, Row, RowEnded
from colocate.features.rows.row_stream import OnError

_OUT = 2  # rows that are given and not read, at most, for each that can run at once


class Flow:
    """Which row goes to which slot, of those that slots take one by one. Without threads and clocks.

    Attributes:
        running: The slot of each row that runs.
        tries: How often each row may begin yet.
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
        """Begin with none given.

        Args:
            rows: Those that wait, in order.
            slots: They.
            places: How many rows run at once on each.
            ahead: How many are out at most: given, and not read; None for any number.
            keys: By row; those with one key go to one slot. None: each goes where most places are free.
            tries: How often each row may begin; once where it isn't named.
        """
        self.running: dict[int, int] = {}
        self.tries = {} if tries is None else tries
        self._waiting = deque(rows)
        self._own: dict[int, deque[int]] = {slot: deque() for slot in slots}  # which only this one takes
        self._free = dict.fromkeys(slots, places)
        self._ahead = ahead
        self._out = 0
        self._keys = keys
        self._homes: dict[Hashable, int] = {}
        self._bereft: set[int] = set()  # slots on which rows fail at once

    @property
    def waits(self) -> bool:
        """Whether rows wait."""
        return bool(self._waiting) or any(self._own.values())

    @property
    def is_stalled(self) -> bool:
        """Whether rows wait until some have been read."""
        return self._ahead is not None and self._out >= self._ahead and self.waits

    def give(self) -> list[tuple[int, int]]:
        """Give out the rows that can begin now: slot and row of each."""
        found: list[tuple[int, int]] = []
        while (self._ahead is None or self._out < self._ahead) and (given := self._next()) is not None:
            slot, row = given
            self._free[slot] -= 1
            self._out += 1
            self.running[row] = slot
            self.tries[row] = self.tries.get(row, 1) - 1
            found.append(given)
        return found

    def _next(self) -> tuple[int, int] | None:
        open_slots = sorted((slot for slot in self._able() if self._free[slot]), key=lambda slot: -self._free[slot])
        for slot in open_slots:
            if own := self._own[slot]:
                return slot, own.popleft()
        while open_slots and self._waiting:
            row = self._waiting.popleft()
            if self._keys is None:
                return open_slots[0], row
            home = self._homes.setdefault(self._keys[row], open_slots[0])
            if self._free[home]:
                return home, row
            self._own[home].append(row)
        return None

    def _able(self) -> Collection[int]:
        """The slots on which rows don't fail at once; all where there is none, so that these tell why."""
        return [slot for slot in self._free if slot not in self._bereft] or self._free

    def ended(self, row: int, again: bool = False, is_bereft: bool = False) -> None:
        """A row has ended.

        Args:
            row: The row.
            again: Whether it begins anew, on another slot if there is one.
            is_bereft: Whether other rows fail there, too: they go elsewhere, until one hasn't failed so.
        """
        slot = self.running.pop(row)
        self._free[slot] += 1
        (self._bereft.add if is_bereft else self._bereft.discard)(slot)
        if again:
            self._out -= 1
            others = [other for other in self._able() if other != slot] or [slot]
            self._own[max(others, key=lambda other: self._free[other] - len(self._own[other]))].append(row)
        for each in self._bereft:
            self._waiting.extendleft(reversed(self._own[each]))
            self._own[each].clear()
        if self._bereft:
            self._homes = {key: home for key, home in self._homes.items() if home not in self._bereft}

    def read(self) -> None:
        """Note that a row which has ended was read."""
        self._out -= 1

    def stop(self) -> None:
        """Give out no others."""
        self._waiting.clear()
        for own in self._own.values():
            own.clear()


class RowsCall(PendingCall, abc.ABC):
    """A call whose rows end one by one.

    Attributes:
        on_error: What an error of one row does.
        count: How many there are.
        ends: What has come of each that has ended, by its index: the slot, and its value, packed, or an error.
        heard: Called with it and the index of each, on a thread of the framework, with the order's lock held.
        is_read: Whether its rows are read as they end; otherwise all together are its value.
        order: The order of its group's calls.
    """

    _is_cancelled = True  # what its ranks await, where nobody waits for its rows any more

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
        """Args: order: That of its group's calls. on_error: As in options."""
        super().__init__(label, role, method, targets, ranks)
        self.on_error = on_error
        self.count = rows
        self.ends: dict[int, tuple[int, Any, ColocateError | None]] = {}
        self.heard: Callable[[RowsCall, int], object] = lambda call, row: None
        self.is_read = False
        self.order, self._lock = order, order.lock
        self._read: deque[int] = deque()  # the slots of rows that have been
        self._is_withdrawn = False  # perhaps before it was sent
        self._is_over = False  # whether its ranks have been told that no rows will come
        self._early: dict[int, tuple[int, RowEnded, Any]] = {}  # rows that have ended before their turn, by that
        self._turn = 0  # the next one
        self._is_telling = False  # whether the timers' thread is about to tell them which rows were read

    # -- with the order's lock held

    def begin(self) -> None:
        """Begin to give rows, once the call has been sent."""
        if self._is_withdrawn:
            self._end_rows(withdrawn=True)
        else:
            self._begin()

    @abc.abstractmethod
    def _begin(self) -> None:
        """Give its ranks the rows that they may have at first."""

    def take(self, slot: int, told: RowEnded, body: Any) -> list[tuple[int, RowEnded]]:
        """Take a row that has ended on a rank, now or when its turn comes; return those that were taken, by slot."""
        if told.turn is None:
            self.row_ended(slot, told, body)
            return [(slot, told)]
        taken = []
        self._early[told.turn] = slot, told, body
        while self._early and (self._turn in self._early or self._none_besides(len(self._early))):
            turn = min(self._early)
            self._turn = turn + 1
            slot, told, body = self._early.pop(turn)
            self.row_ended(slot, told, body)
            taken.append((slot, told))
        return taken

    def _none_besides(self, early: int) -> bool:
        """Whether no other row can come as long as so many aren't taken."""
        return False

    @abc.abstractmethod
    def row_ended(self, slot: int, told: RowEnded, body: Any) -> None:
        """Take a row that has ended on a rank."""

    def _note(self, row: int, slot: int, body: Any, error: ColocateError | None = None) -> None:
        self.ends[row] = slot, body, error
        self.moved = time.time()
        self.received += packed_bytes(body)
        self.heard(self, row)

    def _end_rows(self, withdrawn: bool) -> None:
        """Tell its ranks that no rows will come."""
        if withdrawn or not self._is_over:
            self._is_over = True
            self.group.send(self.targets, NoMoreRows(self.seq, withdrawn))
            if withdrawn and self._is_cancelled:
                self._is_to_end()

    def _is_to_end(self) -> None:
        """Give its ranks the time of a hold to end, as nobody waits for its rows, and what they await was cancelled."""
        self.group.services.timers.after(self.group.grace, partial(_look_for_end, weakref.ref(self)))

    def fail_if_left(self, stacks: Stacks) -> None:
        """Fail the group if a rank still runs it."""
        with self._lock:
            if self.done():
                return
            # Others wait for an earlier call, or a hold, and will find that nobody waits.
            stuck = [slot for slot in self.missing() if self.seq in self.order.stacks.ran.get(slot, ())]
            if stuck and not self.order.is_held(self.lane) and not self.group.stood(time.time() - self.group.grace):
                self.group.fail(left_error(self.group, self, stuck[0], stacks.of(stuck[0])))
            else:
                self._is_to_end()

    @property
    def group(self) -> WorkerGroup:
        """The group of the call, once that has been sent."""
        return cast("WorkerGroup", self.link)

    # -- on any thread

    def withdraw(self) -> None:
        """Have no others begin, and those that run cancelled."""
        with self._lock:
            self._is_withdrawn = True
            if self.seq >= 0 and not self.done():
                self._end_rows(withdrawn=True)

    def note_read(self, row: int) -> None:
        """Note once that a row was read."""
        if (end := self.ends.pop(row, None)) is not None:
            self._read.append(end[0])
        self.tell_read()

    def tell_read(self) -> None:
        """Have its ranks told of rows that were read: of all those together that are by then."""
        if self._is_telling or not self._wants_read():
            return
        self._is_telling = True
        self.group.services.timers.soon(self._note_read)

    @abc.abstractmethod
    def _wants_read(self) -> bool:
        """Whether its ranks are to be told of rows that were read."""

    def _note_read(self) -> None:
        self._is_telling = False  # first: what is read from now on is told by another one
        with self._lock:
            if not self.done():
                self._take_read()

    @abc.abstractmethod
    def _take_read(self) -> None:
        """Tell its ranks of those."""

    def value_of(self, row: int) -> Any:
        """The value of a row that has ended; an error that is returned is one.

        Raises:
            ColocateError: Its error.
        """
        slot, body, error = self.ends[row]
        if error is None:
            try:
                return result_of(self.group, self, slot, body)
            except SerializationError as why:
                error = why
                error.row = row
        if self.on_error == "return":
            return error
        raise error

    def _settle(self, raw: Any) -> bool:
        return super()._settle(raw) and self._tell_failure()

    def _joined(self, raw: Sequence[Any]) -> Any:
        if self.is_read:
            return None
        if self.failure is not None:
            raise self.failure
        return [self._of_all(row) for row in range(self.count)]

    def _of_all(self, row: int) -> Any:
        if row not in self.ends:
            raise left_out(self, self.count - len(self.ends))
        return self.value_of(row)


class GivenRows(RowsCall):
    """The call of a method with `rows=`, whose rows ranks are given one by one."""

    def __init__(
        self,
        *args: Any,
        flow: Flow,
        bodies: MutableMapping[int, Any],
        take_number: Callable[[], int],
    ) -> None:
        """Make it.

        Args:
            args: As of any.
            flow: Which rank gets which row.
            bodies: The rows, packed, by index; those that have ended are taken out.
            take_number: Returns the call's number among those of its method. Called once, as the call begins.
        """
        super().__init__(*args)
        self._flow = flow
        self._packed = bodies
        self._take_number = take_number
        self._number = 0

    def _begin(self) -> None:
        self._number = self._take_number()
        self._give()

    def copy_rows(self) -> None:
        """Copy the rows that may be sent later: afterwards the caller may write to the shared memory.

        A row that was sent is in a message already, and is copied only if a retry is possible. The order's lock is
        taken for each row alone: a copy may take long.
        """
        with self._lock:
            waiting = list(self._packed.items())
        for row, body in waiting:
            if self._flow.tries.get(row, 1) and (copy := owned(body)) is not body:
                with self._lock:
                    if row in self._packed:
                        self._packed[row] = copy

    def row_ended(self, slot: int, told: RowEnded, body: Any) -> None:
        """Take what has come of a row, and give out others."""
        row, failure = told.row, told.failure
        again = failure is not None and self._flow.tries[row] > 0 and not self._is_over
        self._flow.ended(row, again, told.is_bereft)
        if failure is None:
            self._note(row, slot, body)
        elif not again:
            self._note(row, slot, None, failure_error(self.group, self, slot, failure, body, row))
        self._give()

    def _none_besides(self, early: int) -> bool:
        return early >= len(self._flow.running)

    def _note(self, row: int, slot: int, body: Any, error: ColocateError | None = None) -> None:
        self._packed.pop(row, None)
        if error is not None and self.on_error == "raise" and self.failure is None:
            self.failure = error
            self._end_rows(withdrawn=True)
        super()._note(row, slot, body, error)

    def _end_rows(self, withdrawn: bool) -> None:
        if withdrawn:
            self._flow.stop()
        super()._end_rows(withdrawn)

    def _give(self) -> None:
        while self._read:
            self._read.popleft()
            self._flow.read()
        while given := self._flow.give():
            for slot, row in given:
                try:
                    self.group.send([slot], Row(self.seq, row, self._number), self._packed[row])
                except Exception as error:  # no descriptor is left, say
                    self._flow.ended(row)
                    words = f"{self.label}, row {row}: it can't be sent: {error_text(error)}"
                    self._note(row, slot, None, SerializationError(words, method=self.method, row=row))
        may_come_again = any(self._flow.tries[row] for row in self._flow.running)
        if not (self._is_over or self._flow.waits or may_come_again):
            self._end_rows(withdrawn=False)

    def _wants_read(self) -> bool:
        return self._flow.is_stalled

    def _take_read(self) -> None:
        self._give()


class YieldedRows(RowsCall):
    """The call of a batched method, whose ranks yield the rows that they have got."""

    def __init__(self, *args: Any, places: Mapping[int, Sequence[int]], is_ahead: bool, is_cancelled: bool) -> None:
        """Make it.

        Args:
            args: As of any.
            places: The indices of the rows of each slot whose rows count.
            is_ahead: Whether these are read.
            is_cancelled: Whether what is awaited for them is cancelled where nobody waits for them any more.
        """
        super().__init__(*args)
        self._is_cancelled = is_cancelled
        self._rows_of = places
        self._is_ahead = is_ahead

    def _begin(self) -> None:
        if not self._is_ahead:  # all may come at once
            for slot, rows in self._rows_of.items():
                self.group.send([slot], ReadRows(self.seq, len(rows)))

    def row_ended(self, slot: int, told: RowEnded, body: Any) -> None:
        """Take what has come of a row."""
        self._note(self._rows_of[slot][told.row], slot, body)

    def _wants_read(self) -> bool:
        return self._is_ahead and len(self._read) >= AHEAD // 2

    def _take_read(self) -> None:
        counts: Counter[int] = Counter()
        with contextlib.suppress(IndexError):
            while True:
                counts[self._read.popleft()] += 1
        for slot, count in counts.items():
            self.group.send([slot], ReadRows(self.seq, count))


def left_out(call: RowsCall, count: int) -> ColocateError:
    """The error of rows that a call has left out, as it saw that it was cancelled, or its group closes."""
    left, closed_by = plural(count, "row"), call.group.closed_by
    if closed_by is not None:
        words = f"group {call.group.name!r} was closed by {closed_by} before {call.label} had ended {left}"
        return ClosedError(words, closed_by=closed_by)
    return CallCancelled(
        f"{call.label} was cancelled while it ran (ctx.cancelled), and has ended without {left}", method=call.method
    )


def left_error(link: WorkerGroup, call: PendingCall, slot: int, stack: str) -> ColocateError:
    """The error of a group one of whose ranks goes on with rows that nobody waits for."""
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


def _look_for_end(ref: weakref.ref[RowsCall]) -> None:
    if (call := ref()) is not None and not call.done():
        call.order.stacks.ask(call.missing(), call.fail_if_left)


class CallNumbers:
    """Counts a group's calls of methods with `rows=`: rows draw random numbers by these counts.

    A checkpoint has the counts: a restored run draws the same numbers. Callers hold the order's lock.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def take(self, label: str, known: int | None) -> int:
        """Return the number of a method's next call; the known number if a call goes on after a restart."""
        number = self._counts.get(label, 0) if known is None else known
        self.raise_to({label: number + 1})
        return number

    def raise_to(self, counts: Mapping[str, int]) -> None:
        """Raise counts that are lower than these."""
        self._counts |= {label: max(count, self._counts.get(label, 0)) for label, count in counts.items()}

    def counts(self) -> dict[str, int]:
        """Return the counts, by the labels of methods."""
        return dict(self._counts)

    def reset(self, counts: Mapping[str, int]) -> None:
        """Begin again with these counts."""
        self._counts = dict(counts)


@attrs.frozen
class RowOptions:
    """With what such a method is called; see `RowCall.options`."""

    timeout: float | None = None
    ranks: Sequence[int] | None = None
    on_error: OnError = "raise"
    retry: int = 0
    sticky: Callable[[Any], object] | None = None


@attrs.define(eq=False)
class Asked:
    """What was asked for, of which a call is made, and perhaps another one when the group has been restarted."""

    worker_group: WorkerGroup
    role: RoleInfo
    spec: MethodSpec
    label: str
    options: RowOptions
    consumer: Consumer
    arguments: Mapping[str, Any]  # without the rows that are given one by one
    count: int = 0  # how many rows there are; of those that ranks get at once it is known when they are split
    bodies: dict[int, Any] = attrs.field(factory=dict)
    keys: Mapping[int, Hashable] | None = None
    tries: dict[int, int] = attrs.field(factory=dict)
    at: Any = None  # the line that has asked
    number: int | None = None  # the call's number among the method's calls; a restart keeps this number
    shared: Any = None  # the other arguments, packed, and the residents used there: for a call after a restart
    shared_uses: Sequence[Reference] = ()

    def begin(
        self,
        rows: Sequence[int],
        is_ahead: bool,
        prepare: Callable[[RowsCall], object] = lambda call: None,
        is_again: bool = False,
    ) -> RowsCall:
        """Send a call of some of the rows.

        Args:
            rows: Those that are given one by one.
            is_ahead: Whether they are read one by one, and as many run ahead of that.
            prepare: Is told of the call before it is sent.
            is_again: Whether an earlier one has ended with the group's restart, of which others are to be told yet.
        """
        worker_group, role, spec = self.worker_group, self.role, self.spec
        uses: list[Reference] = []
        if is_again:  # the packed arguments: the caller may have changed the originals since then
            arguments, uses = {}, [use.bound(self.consumer) for use in self.shared_uses]
        else:
            arguments = with_references(dict(self.arguments), worker_group, self.consumer, self.label, uses)
        planned = plan(spec.dispatch, arguments, role.ranks, self.options.ranks)
        targets: Sequence[int] = role.slots
        if not isinstance(planned.targets, range):
            targets = [targets[rank] for rank in planned.targets]
        order = worker_group.order
        where = self.label, role.name, spec.name, targets, planned.targets, order, self.options.on_error
        call: RowsCall
        if spec.rows is not None:
            ahead = _OUT * spec.concurrency * len(targets) if is_ahead else None
            flow = Flow(rows, targets, spec.concurrency, ahead, self.keys, self.tries)
            call = GivenRows(*where, self.count, flow=flow, bodies=self.bodies, take_number=self._take_number)
            planned = attrs.evolve(planned, valid=[len(rows)] * len(targets))  # which of them a rank gets isn't known
        else:
            places: dict[int, Sequence[int]] = {}
            self.count = 0
            for rank in spec.collect.sources(role.ranks):
                size = planned.valid[rank] or 0
                own = range(self.count, self.count + size) if planned.partition is None else planned.partition[rank]
                places[role.slots[rank]] = own
                self.count += size
            is_cancelled = spec.is_async and len(places) == len(role.slots)  # others mustn't leave their common steps
            call = YieldedRows(*where, self.count, places=places, is_ahead=is_ahead, is_cancelled=is_cancelled)
            call.partition = planned.partition
        prepare(call)
        packed = [self.shared] * len(targets) if is_again else None
        draft = ready(worker_group, call, role, spec, planned, uses, self.options.timeout, packed)
        if spec.rows is not None and worker_group.restarts.limit and not is_again:
            self.shared, self.shared_uses = owned(draft.bodies[0]), uses
        self.at = call.at = self.at or call.at
        if worker_group.services.observers and not worker_group.services.executor.in_process:
            call.sent += sum(packed_bytes(self.bodies[row]) for row in rows) if spec.rows is not None else 0
        send_now(draft, call.begin, is_again)
        if isinstance(call, GivenRows) and not is_again:
            call.copy_rows()
        return call

    def _take_number(self) -> int:
        """Return the number of the call: a new one, or the known one after a restart. Callers hold the order's lock."""
        numbers: CallNumbers = self.worker_group.part("rows").numbers  # type: ignore[attr-defined]
        self.number = numbers.take(self.label, self.number)
        return self.number

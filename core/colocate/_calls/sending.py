"""Send the calls of one group, in the group's order. A call is sent to all of the call's ranks.

If sending fails for some ranks, the ranks that have received the call withdraw it in a hold (`abandon_call`).

A `Draft` is a call that is ready to send. `Messages` are the encoded drafts, with one message for each worker that has
a part. Features may insert calls in front, for example to wake a role that may sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs

from colocate._calls.handles import KeptResident, Reference
from colocate._calls.passing import plan_relays
from colocate._calls.pending import PendingCall, UnsentCalls, blocked_calls
from colocate._calls.records import EndedCall
from colocate._calls.residents import Pin, ResidentRecord
from colocate._definitions.bundles import check_shared_parameters
from colocate._definitions.codec import pack
from colocate._definitions.packed import Packed, copy_buffers, count_packed_bytes
from colocate._protocol import to_worker
from colocate._protocol.bundle import bundle_bodies
from colocate._role import context
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._signals.in_framework import is_in_framework
from colocate._system.lines import find_user_line
from colocate._system.numbers import FOREVER_S
from colocate._values.dispatch import Arguments, Plan, plan_call
from colocate._values.mesh import get_default_meshes
from colocate.errors import ColocateError, PipelineError
from colocate.wire import HOLE
from colocate.worker.serving.build import GROUP_WIDE_CALLS

if TYPE_CHECKING:
    from colocate._worker_group.worker_group import WorkerGroup
    from colocate._worker_group.workforce import Worker
    from colocate.features.pipelines.driver import Pipeline


OPEN: ContextVar[Pipeline | None] = ContextVar("colocate_recorder", default=None)


def current_recorder(worker_group: WorkerGroup) -> Pipeline | None:
    """Return the open pipeline that collects a group's calls on this thread or task; None without a pipeline."""
    recorder = OPEN.get()
    return recorder if recorder is not None and recorder.records(worker_group) else None


@attrs.define(eq=False)
class Draft:
    """A call that is ready to send. `bodies` and `valid` have one item for each target slot.

    `wakes` has the needed memory by role; None for the memory that the method declares for its own role.
    """

    worker_group: WorkerGroup
    call: PendingCall
    bodies: Sequence[Any]
    valid: Sequence[int | None]
    timeout: float
    recorder: Pipeline | None = None
    record: ResidentRecord | None = None
    pin: Pin | None = None
    wakes: Mapping[str, Sequence[str]] | None = None

    def lend(self) -> None:
        """Lend the used residents to the call. Takes no lock.

        Raises:
            ColocateError: A resident has been freed, or its group has failed.
        """
        call = self.call
        try:
            for use in call.uses:
                use.lend(call, self.worker_group.residents)
        except BaseException:
            for use in call.uses:
                use.give_back()
            raise


def prepare_draft(
    worker_group: WorkerGroup,
    call: PendingCall,
    role: RoleInfo,
    spec: MethodSpec,
    planned: Plan,
    uses: list[Reference],
    timeout: float | None,
    packed: Sequence[Any] | None = None,
) -> Draft:
    """Prepare a call, on the caller's thread because users' code may run. Errors are raised before anything is sent.

    Args:
        worker_group: The group.
        call: The call.
        role: The role of the method.
        spec: The method.
        planned: How the arguments reach the ranks.
        uses: The residents among the arguments.
        timeout: Seconds until the call is given up; None for the runtime's default, `FOREVER_S` for never.
        packed: The packed arguments, if known already.
    """
    services = worker_group.services
    executor = services.executor
    call.at, call.link, call.info, call.spec = find_user_line(3), worker_group, role, spec
    if worker_group.background:
        assign_lane(worker_group, call)
    if packed is None:
        bodies: dict[int, Any] = {}
        for arguments in planned.arguments:
            if id(arguments) not in bodies:
                body = executor.codec.pack_arguments(cast("dict[str, Any]", arguments), call.label)
                bodies[id(arguments)] = body
                if getattr(body, "has_trained", False):
                    check_shared_parameters(arguments, (*body.needs, *pack(role.cls).needs), call.label)
        packed = [bodies[id(arguments)] for arguments in planned.arguments]
    if not executor.in_process:
        worker_group.published.check_changes(call, packed)
    recorder = current_recorder(worker_group) if OPEN.get() is not None else None
    if uses:
        call.uses = uses
        for use in uses:
            other = use._kept.call.unsent
            if other is not None and other is not recorder:
                raise PipelineError(
                    f"{call.label} would be sent before {use._kept.source.label}, whose resident it uses and which "
                    "waits in the pipeline of its group: make the call after that block, or open a pipeline of this "
                    "call's group too"
                )
    observers = services.observers
    if uses or observers:
        call.on_end = partial(on_call_settled, worker_group)
        if observers and not executor.in_process:
            call.sent = sum(map(count_packed_bytes, packed))
    return Draft(
        worker_group, call, packed, planned.valid, services.call_timeout if timeout is None else timeout, recorder
    )


def assign_lane(worker_group: WorkerGroup, call: PendingCall) -> None:
    """Assign the call to a lane, or to all lanes."""
    if call.role in worker_group.background:
        call.lane = call.role
    if not call.role:
        call.is_for_all = call.method in GROUP_WIDE_CALLS


def on_call_settled(worker_group: WorkerGroup, call: PendingCall, error: BaseException | None) -> None:
    """End the loans of a call that is about to be settled, and report the call to observers."""
    if worker_group.services.observers and call.seq >= 0:  # A call without a number was never sent.
        services = worker_group.services
        services.dispatcher.call_batched(
            partial(services.observers.notify_call, _make_ended_call(worker_group, call, error))
        )
    for use in call.uses:
        use.give_back()
    call.uses = ()


def _make_ended_call(worker_group: WorkerGroup, call: PendingCall, error: BaseException | None) -> EndedCall:
    used = [use._kept for use in call.uses]
    # No bytes are sent if the ranks are threads of this process.
    travels = not worker_group.services.executor.in_process
    return EndedCall(
        worker_group.name,
        call.role,
        call.method,
        call.ranks,
        call.spans,
        call.raised,
        call.stragglers,
        call.submitted,
        None if error is None else time.time(),
        call.keep is not None,
        None if error is None else str(error).partition("\n")[0],
        max([call.submitted, *(end for record in used for _, _, end in record.call.spans)]),
        call.sent,
        sum(map(count_packed_bytes, call.bodies)) + call.received if travels else 0,
        call.receipts,
        {
            record.source.key: (record.source.group, record.call.role, record.call.method)
            for record in used
            if call.receipts
        },
    )


def submit(draft: Draft) -> PendingCall:
    """Add a call to the open pipeline, or send the call; within framework code the timers' thread sends the call."""
    if draft.recorder is not None:
        draft.recorder.add_draft(draft)
    elif is_in_framework():
        _send_later(draft)
    else:
        send_now(draft)
    return draft.call


def send_blocking(draft: Draft) -> PendingCall:
    """Send a call now; raise an error if the caller would wait for ever."""
    if blocked_calls:
        draft.call.check_deadlock()
    send_now(draft)
    return draft.call


def keep(draft: Draft) -> KeptResident[Any]:
    """Send a call with a kept result, and return the handle of the result."""
    worker_group, call = draft.worker_group, draft.call
    residents = worker_group.residents
    call.keep = worker_group.base + worker_group.services.new_key()
    scopes = residents.open_scopes()
    assert call.info is not None
    assert call.spec is not None
    resident: KeptResident[Any] = KeptResident(residents, worker_group.make_source(call, call.info, call.spec), call)
    draft.record = resident._kept
    try:
        submit(draft)
    except BaseException:
        residents.forget_unsent(resident._kept)
        raise
    residents.flush_later()
    residents.free_at_end(scopes, resident._kept)
    return resident


def _send_later(draft: Draft) -> None:
    """Send a call on the timers' thread, because the framework's own code is running on this thread."""
    worker_group, record = draft.worker_group, draft.record
    bodies = {id(body): copy_buffers(body) for body in draft.bodies}
    # Copied now, because the caller may write to the arguments.
    draft.bodies = [bodies[id(body)] for body in draft.bodies]
    draft.lend()
    if record is not None:
        # The workers mustn't free the resident before the call is sent.
        draft.pin = worker_group.residents.pin(record)
        worker_group.residents.add_record(record)
    draft.call.unsent = UnsentCalls()

    def send_it() -> None:
        with suppress(BaseException):  # The call itself reports the error.
            send_now(draft)
        draft.pin = None

    worker_group.services.timers.call_soon(send_it)


def send_now(draft: Draft, then: Callable[[], object] | None = None, is_again: bool = False) -> None:
    """Send a call now, on this thread.

    Args:
        draft: The call.
        then: Sends further messages of the call, under the same hold of the order's lock.
        is_again: Whether this call replaces one from before the group's restart.
    """
    worker_group, call = draft.worker_group, draft.call
    try:
        messages = Messages((draft,))
        try:
            with worker_group.order.lock:
                worker_group.check_usable(notes_restarts=not is_again)
                draft.lend()
                if draft.record is not None:
                    worker_group.residents.add_record(draft.record)
                sent = send(messages)
                if then is not None:
                    try:
                        then()
                    except BaseException as error:
                        worker_group.order.abandon_call(call, error, True)
                        raise
        finally:
            messages.discard()
    except BaseException as error:
        worker_group.order.drop_call(call, error)  # A second drop has no effect.
        raise
    set_timeouts(sent)


class Messages:
    """The encoded calls of one group, one message for each worker that takes part. Only the calls' numbers are missing.

    The encoding runs on the caller's thread before the order's lock is taken, because it may take long. Only if a
    feature prepends calls, the messages are encoded again under the lock.
    """

    __slots__ = ("_calls", "_frames", "_frees", "_needs", "_puts", "_unlocated", "_worker_group", "drafts")

    def __init__(self, drafts: Sequence[Draft]) -> None:
        """Encode the drafts.

        Raises:
            BaseException: There is no descriptor or memory left, say.
        """
        self.drafts = drafts
        self._worker_group = worker_group = drafts[0].worker_group
        self._frees: Sequence[int] = ()  # Keys of residents that the receivers free.
        self._needs = False
        self._frames: list[tuple[Any, list[int]]] = []
        self._calls: list[PendingCall] = []  # One call for each placeholder of a number, in the order of `_puts`.
        self._puts: list[Callable[[int], object]] = []
        self._unlocated: Sequence[Worker] = ()
        lots, everywhere = _group_drafts(drafts)
        if worker_group.residents.ended and everywhere == len(worker_group.workforce.workers):
            self._frees = worker_group.residents.take_frees()
        for lot, slots in lots:
            calls = [_make_message(draft, index, HOLE + place) for place, (draft, index) in enumerate(lot)]
            message: to_worker.Call | to_worker.Batch
            if len(lot) == 1:
                ((draft, index),), (message,) = lot, calls
                body, message.frees = draft.bodies[index], self._frees  # type: ignore[misc]  # not shared yet
            else:
                wheres, body = bundle_bodies([draft.bodies[index] for draft, index in lot])
                message = to_worker.Batch(self._frees, list(zip(calls, wheres, strict=True)))
            if body is not None:
                self._needs = self._needs or bool(getattr(body, "needs", ()))
            relays: Sequence[tuple[int, to_worker.Passed]] = ()
            if len(slots) > 1 and isinstance(body, Packed) and body.nbytes >= to_worker.PASSED_BYTES:
                slots, relays = self._pass_on(message, slots)
            self._add_frame(lot, message, body, slots)
            # These messages follow the body, because the receivers fetch the body from another worker.
            for slot, passed in relays:
                message.passed = passed  # type: ignore[misc]
                self._add_frame(lot, message, None, [slot])

    def _pass_on(
        self, message: to_worker.Call | to_worker.Batch, slots: list[int]
    ) -> tuple[list[int], Sequence[tuple[int, to_worker.Passed]]]:
        """Return the slots that get a large body from the driver, and the routes to all other receivers."""
        group = self._worker_group
        workers = group.workforce.workers
        relays, self._unlocated = plan_relays((workers[slot] for slot in slots), group.base + group.services.new_key())
        if not relays:
            return slots, ()
        (_, message.passed), *other_relays = relays  # type: ignore[misc]
        apart = {slot for slot, _ in other_relays}
        return [slot for slot in slots if slot not in apart], other_relays

    def _add_frame(self, lot: list[tuple[Draft, int]], message: Any, body: Any, slots: list[int]) -> None:
        frame, puts = self._worker_group.services.executor.numbered(message, body)
        self._frames.append((frame, slots))
        self._puts += puts
        self._calls += [draft.call for draft, _ in lot]

    def send(self) -> None:
        """Assign the calls places in the group's order, and send all messages. The caller holds the order's lock.

        Raises:
            BaseException: There is no descriptor left, say: all of the calls have failed.
        """
        worker_group, drafts = self._worker_group, self.drafts
        order, workers = worker_group.order, worker_group.workforce.workers
        sent = False
        try:
            for worker in self._unlocated:  # With the address, the next large body can be forwarded.
                worker.locate(lambda *_: None)
            if self._needs:
                slots = [slot for _, slots in self._frames for slot in slots]
                worker_group.published.send_definitions(slots, (body for draft in drafts for body in draft.bodies))
            for draft in drafts:
                for part in worker_group.parts.values() if draft.call.is_for_all else ():
                    part.check_send(draft.call)
                order.enqueue_call(draft.call)
            for call, put in zip(self._calls, self._puts, strict=True):
                put(call.seq)
            if not self._frees and worker_group.frees_first and worker_group.residents.ended:
                worker_group.residents.send_frees()  # The calls may need the freed memory.
            for frame, slots in self._frames:
                for slot in slots:
                    sent = True
                    workers[slot].host.send(frame)
            if self._frees:
                worker_group.residents.told(self._frees)
                self._frees = ()
        except BaseException as error:
            for draft in drafts:
                order.abandon_call(draft.call, error, sent)
            raise

    def put_frees_back(self) -> None:
        """Put the unsent keys of freed residents back into the queue for later messages."""
        self._worker_group.residents.ended.extend(self._frees)
        self._frees = ()

    def discard(self) -> None:
        """Release the messages, after the send or without a send."""
        self.put_frees_back()
        for frame, _ in self._frames:
            self._worker_group.services.executor.discard(frame)


def _group_drafts(drafts: Sequence[Draft]) -> tuple[list[tuple[list[tuple[Draft, int]], list[int]]], int]:
    """Group the workers that get the same calls and bodies; return the calls and slots of each group of workers.

    The second result is the number of slots.
    """
    lots: list[tuple[list[tuple[Draft, int]], list[int]]] = []
    if len(drafts) == 1:
        (draft,) = drafts
        last, rows, targets = None, None, draft.call.targets
        for index, (slot, body, valid) in enumerate(zip(targets, draft.bodies, draft.valid, strict=True)):
            if index and body is last and valid == rows:
                lots[-1][1].append(slot)
            else:
                last, rows = body, valid
                lots.append(([(draft, index)], [slot]))
        return lots, len(targets)
    by_slot: dict[int, list[tuple[Draft, int]]] = {}
    for draft in drafts:
        for index, slot in enumerate(draft.call.targets):
            by_slot.setdefault(slot, []).append((draft, index))
    slots_by_key: dict[tuple[Any, ...], list[int]] = {}
    for slot, lot in by_slot.items():
        key = tuple([(id(draft), id(draft.bodies[index]), draft.valid[index]) for draft, index in lot])
        if (slots := slots_by_key.get(key)) is None:
            slots_by_key[key] = slots = []
            lots.append((lot, slots))
        slots.append(slot)
    return lots, len(by_slot)


def _make_message(draft: Draft, index: int, seq: int) -> to_worker.Call:
    call = draft.call
    uses = bool(call.uses)
    observed = uses and bool(draft.worker_group.services.observers)
    assert call.info is not None
    return to_worker.Call(seq, call.info.key, call.method, call.keep, draft.valid[index], uses, (), observed)


def set_timeouts(drafts: Sequence[Draft]) -> None:
    """Start the deadlines of sent calls in reverse order, so that the deadline of an inserted wake starts last."""
    for draft in reversed(drafts):
        if draft.timeout < FOREVER_S:
            draft.worker_group.order.set_timeout(draft.call, draft.timeout)


# -- calls of whole workers


def make_group_role(worker_group: WorkerGroup) -> RoleInfo:
    """Return a stand-in role for calls that run on all workers of a group, not on a user's role."""
    slots = range(len(worker_group.workforce.workers))
    key = len(slots), worker_group.services.seed
    return RoleInfo("", object, {}, slots, get_default_meshes(len(slots)), "", key=key)


def for_all(
    worker_group: WorkerGroup,
    label: str,
    method: str,
    spec: MethodSpec,
    arguments: Arguments,
    timeout: float | None = None,
) -> Draft:
    """Prepare a call that runs on all workers of a group, not on a user's role.

    Args:
        worker_group: The workers' group.
        label: The call's label in messages.
        method: The method's name.
        spec: The method.
        arguments: The arguments.
        timeout: Seconds until the call is given up; None for never.
    """
    info = make_group_role(worker_group)
    planned = plan_call(spec.dispatch, arguments, info.ranks)
    call = PendingCall(label, "", method, info.slots)
    return prepare_draft(worker_group, call, info, spec, planned, [], FOREVER_S if timeout is None else timeout)


def send(messages: Messages) -> Sequence[Draft]:
    """Send calls of one group, and calls that features insert; return all. The caller holds the order's lock."""
    drafts, worker_group = messages.drafts, messages._worker_group
    all_drafts = drafts
    for part in worker_group.drafting:
        all_drafts = part.prepend_calls(all_drafts)
    if all_drafts is drafts:
        messages.send()
        return drafts
    messages.put_frees_back()
    together = Messages(all_drafts)
    try:
        together.send()
    finally:
        together.discard()
    return all_drafts


def refuse_here(worker_group: WorkerGroup, label: str) -> None:
    """Refuse a blocking call inside a pipeline, on a closed or failed group, or from role code."""
    if (recorder := current_recorder(worker_group)) is not None:
        recorder.refuse_call(label)
    worker_group.check_usable()
    refuse_inside(label, worker_group.name)


def refuse_inside(label: str, group: str) -> None:
    if (inside := context.current()) is not None and inside.hosted:
        caller = f"role {inside.role!r}" if inside.role is not None else "a function of group.run"
        raise ColocateError(
            f"{caller} called {label} of group {group!r} from inside a worker: the call could wait for its own "
            "worker for ever. Make the call from the driver; for a role of this slot use ctx.sibling(...)"
        )

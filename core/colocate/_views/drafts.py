"""Drafts: calls that are ready, and how those of one group are sent together. A plain call is a draft by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import attrs

from colocate._calls.pending import PendingCall
from colocate._calls.records import Ended
from colocate._crew.crew import Crew
from colocate._kept.kept import Hold, Kept
from colocate._protocol import to_worker
from colocate._protocol.bundle import together
from colocate._protocol.message import Message
from colocate._role.info import RoleInfo
from colocate._role.method_spec import MethodSpec
from colocate._system.numbers import FOREVER_S
from colocate.errors import ColocateError
from colocate.executor import Posting
from colocate.wire import HOLE


class Recorder(Protocol):
    """A pipeline that is open."""

    def add(self, draft: Draft, kept: Kept | None = None) -> None:
        """Record a call, and what it keeps."""
        ...


@attrs.define(eq=False)
class Draft:
    """A call that will be sent, or recorded by the pipeline that is open here.

    `bodies` go along the call's targets, and so does `valid`.
    """

    crew: Crew
    call: PendingCall
    role: RoleInfo
    spec: MethodSpec
    bodies: Sequence[Any]
    valid: Sequence[int | None]
    timeout: float
    pipeline: Recorder | None = None
    kept: Kept | None = None
    hold: Hold | None = None

    def lend(self) -> None:
        """What it uses is lent to it from now on. This takes no lock.

        Raises:
            ColocateError: A resident has been freed, or its group has failed.
        """
        call = self.call
        try:
            for use in call.uses:
                use.lend(call, self.crew.residents)
        except BaseException:
            for use in call.uses:
                use.give_back()
            raise


def settled(crew: Crew, call: PendingCall, error: BaseException | None) -> None:
    """A call is about to be: what it used is given back, and observers are told."""
    if crew.services.observers and call.seq >= 0:  # otherwise it was never sent
        services = crew.services
        ended = Ended.of(crew.name, call, error, services.executor.in_process)
        services.dispatcher.gather(partial(services.observers.tell_call, ended))
    for use in call.uses:
        use.give_back()
    call.uses = ()


def send(drafts: Sequence[Draft]) -> None:
    """Give calls of one group their places in its order, and send them: one message to each worker that has a part.

    The order's lock is held.

    Raises:
        BaseException: No descriptor or memory is left, say: none of the calls goes on.
    """
    crew = drafts[0].crew
    executor, workers, order = crew.services.executor, crew.workforce.workers, crew.order
    sent: list[int] = []
    frees: Sequence[int] = ()
    order.gate.shut("a message")  # what is posted amid it would come before it at some workers, and behind it at others
    try:
        lots = _lots(drafts)
        roles = [draft.role.key for draft in drafts]
        crew.taught.before(lots, (body for draft in drafts for body in draft.bodies), roles)
        for draft in drafts:
            order.enter(draft.call)
        if crew.residents.news:
            if len(lots) == len(workers):
                frees = crew.residents.take()
            elif crew.declared.budgets:  # the calls may need the room
                crew.residents.tell()
        last = frame = None
        for slot, lot in lots.items():
            if last is None or not _is_same(lot, last):
                if frame is not None:
                    executor.discard(frame)
                message, body = _message(lot, frees)
                head: Any = message if executor.in_process else message.head()
                frame, last = executor.frame(head, body), lot
            sent.append(slot)
            workers[slot].host.send(frame)
        executor.discard(frame)
    except BaseException as error:
        crew.residents.put_back(frees)
        for draft in drafts:
            order.give_up(draft.call, error, bool(sent))
        raise
    finally:
        order.gate.open("a message")


def watch(drafts: Sequence[Draft]) -> None:
    """Give up on calls that were sent when their time is over; on a wake after those that have asked for it."""
    for draft in reversed(drafts):
        if draft.timeout < FOREVER_S:
            draft.crew.order.watch(draft.call, draft.timeout)


def post(drafts: Sequence[Draft]) -> bool:
    """Send calls of one group at once, on the caller's thread; False where there is something to be seen to first."""
    crew = drafts[0].crew
    executor, order, residents = crew.services.executor, crew.order, crew.residents
    if not order.gate.passes or crew.sleepers or crew.taught.has_news():
        return False
    lots = _lots(drafts)
    frees: tuple[int, ...] = ()
    told: Callable[[], object] | None = None
    if residents.news:
        if len(lots) == len(crew.workforce.workers):
            frees, told = residents.untold()
        elif crew.declared.budgets:  # the calls may need the room
            return False
    numbers: list[tuple[PendingCall, Callable[[int], object]]] = []
    postings: list[Posting] = []
    last = frame = None
    for slot, lot in lots.items():
        if last is None or not _is_same(lot, last):
            last = lot
            message, body = _message(lot, frees, HOLE)
            needs: Sequence[Any] = getattr(body, "needs", ())
            if needs:
                return False
            if (found := executor.numbered(message, body)) is None:
                return False
            frame, puts = found
            numbers += zip([draft.call for draft, _ in lot], puts, strict=True)
        if (posting := crew.workforce.workers[slot].host.post(frame)) is None:
            return False
        postings.append(posting)
    for draft in drafts:
        call = draft.call
        if call.uses and draft.pipeline is None:
            try:
                draft.lend()
            except ColocateError:  # which is told again
                return False
        if draft.timeout < FOREVER_S and call.timer is None:
            call.timer = crew.services.timers.after(draft.timeout, partial(order.late, call, draft.timeout))
    if not order.post([draft.call for draft in drafts], numbers, postings):
        return False
    if told is not None:
        told()
    return True


def _lots(drafts: Sequence[Draft]) -> dict[int, list[tuple[Draft, int]]]:
    """The calls of each worker by its slot, and which of their bodies it gets."""
    if len(drafts) == 1:
        (draft,) = drafts
        return {slot: [(draft, index)] for index, slot in enumerate(draft.call.targets)}
    lots: dict[int, list[tuple[Draft, int]]] = {slot: [] for draft in drafts for slot in draft.call.targets}
    for draft in drafts:
        for index, slot in enumerate(draft.call.targets):
            lots[slot].append((draft, index))
    return lots


def _is_same(lot: Sequence[tuple[Draft, int]], other: Sequence[tuple[Draft, int]]) -> bool:
    """Whether two workers get the same message."""
    return len(lot) == len(other) and all(
        draft is its and draft.bodies[index] is its.bodies[place] and draft.valid[index] == its.valid[place]
        for (draft, index), (its, place) in zip(lot, other, strict=True)
    )


def _message(lot: Sequence[tuple[Draft, int]], frees: Sequence[int], seq: int | None = None) -> tuple[Message, Any]:
    """One message for all calls of one worker, and its body; with `seq` they have the numbers from that on."""
    if len(lot) == 1:
        ((draft, index),) = lot
        return _call(draft, index, frees, seq), draft.bodies[index]
    wheres, body = together([draft.bodies[index] for draft, index in lot])
    calls = [
        (_call(draft, index, (), None if seq is None else seq + place), where)
        for place, ((draft, index), where) in enumerate(zip(lot, wheres, strict=True))
    ]
    return to_worker.Batch(tuple(frees), calls), body


def _call(draft: Draft, index: int, frees: Sequence[int], seq: int | None) -> to_worker.Call:
    call = draft.call
    uses = bool(call.uses)
    observed = uses and bool(draft.crew.services.observers)
    number = call.seq if seq is None else seq
    return to_worker.Call(number, draft.role.key, call.method, call.keep, draft.valid[index], uses, frees, observed)

"""Drafts: calls that are ready, and the messages by which those of one group are sent together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import attrs

from colocate._calls.pending import PendingCall
from colocate._calls.records import Ended
from colocate._crew.crew import Crew
from colocate._kept import Hold, Kept
from colocate._protocol import to_worker
from colocate._protocol.bundle import together
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._system.numbers import FOREVER_S
from colocate.errors import ColocateError
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


class Messages:
    """Calls of one group, encoded: one message to each worker that has a part. Only their numbers are missing.

    They are made on the thread of whoever calls, who may have much to encode, and holds nothing.
    """

    __slots__ = ("_crew", "_frames", "_needs", "_numbers", "_told", "drafts")

    def __init__(self, drafts: Sequence[Draft]) -> None:
        """Encode them.

        Raises:
            BaseException: No descriptor or memory is left, say.
        """
        self.drafts = drafts
        self._crew = crew = drafts[0].crew
        self._told: Callable[[], object] | None = None
        self._needs = False
        self._frames: list[tuple[Any, list[int]]] = []
        self._numbers: list[tuple[PendingCall, Callable[[int], object]]] = []
        lots = _lots(drafts)
        frees: tuple[int, ...] = ()
        if crew.residents.news and len(lots) == len(crew.workforce.workers):
            frees, self._told = crew.residents.untold()
        last: Sequence[tuple[Draft, int]] = ()
        for slot, lot in lots.items():
            if self._frames and _is_same(lot, last):
                self._frames[-1][1].append(slot)
                continue
            last = lot
            message, body = _message(lot, frees)
            self._needs = self._needs or bool(getattr(body, "needs", ()))
            frame, puts = crew.services.executor.numbered(message, body)
            self._frames.append((frame, [slot]))
            self._numbers += zip([draft.call for draft, _ in lot], puts, strict=True)

    def post(self) -> bool:
        """Send the calls at once, on the caller's thread; False where there is something to be seen to first."""
        crew = self._crew
        order, passes = crew.order, crew.order.gate.passes  # before the workers: a restart has others, and another list
        workers = crew.workforce.workers
        if self._needs or not passes or crew.sleepers:
            return False
        if self._told is None and crew.declared.budgets and crew.residents.news:  # the calls may need the room
            return False
        hosts = [workers[slot].host for _, slots in self._frames for slot in slots]
        posting = crew.services.executor.post(hosts, [frame for frame, slots in self._frames for _ in slots])
        if posting is None:
            return False
        for draft in self.drafts:
            call = draft.call
            if call.uses and draft.pipeline is None:
                try:
                    draft.lend()
                except ColocateError:  # which is told again
                    return False
            if draft.timeout < FOREVER_S and call.timer is None:
                call.timer = crew.services.timers.after(
                    draft.timeout, partial(order.late, weakref.ref(call), draft.timeout)
                )
        calls = [draft.call for draft in self.drafts]
        if not order.post(calls, self._numbers, posting, passes, crew.sleepers.marks):
            return False
        if self._told is not None:
            self._told()
        return True  # what is so small holds nothing to be discarded

    def send(self) -> None:
        """Give the calls their places in the group's order, and send them. The order's lock is held.

        Raises:
            BaseException: No descriptor is left, say: none of the calls goes on.
        """
        crew, drafts = self._crew, self.drafts
        order, workers = crew.order, crew.workforce.workers
        sent = False
        order.gate.shut("a message")  # what is posted amid it would come before it at some workers, behind it at others
        try:
            slots = [slot for _, slots in self._frames for slot in slots]
            crew.taught.before(slots, (body for draft in drafts for body in draft.bodies))
            for draft in drafts:
                order.enter(draft.call)
            for call, put in self._numbers:
                put(call.seq)
            if self._told is None and crew.declared.budgets and crew.residents.news:  # the calls may need the room
                crew.residents.tell()
            for frame, slots in self._frames:
                for slot in slots:
                    sent = True
                    workers[slot].host.send(frame)
            if self._told is not None:
                self._told()
        except BaseException as error:
            for draft in drafts:
                order.give_up(draft.call, error, sent)
            raise
        finally:
            order.gate.open("a message")

    def discard(self) -> None:
        """They have been sent, or won't be."""
        for frame, _ in self._frames:
            self._crew.services.executor.discard(frame)


def watch(drafts: Sequence[Draft]) -> None:
    """Give up on calls that were sent when their time is over; on a wake after those that have asked for it."""
    for draft in reversed(drafts):
        if draft.timeout < FOREVER_S:
            draft.crew.order.watch(draft.call, draft.timeout)


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


def _message(lot: Sequence[tuple[Draft, int]], frees: Sequence[int]) -> tuple[to_worker.Call | to_worker.Batch, Any]:
    """One message for all calls of one worker, and its body."""
    if len(lot) == 1:
        ((draft, index),) = lot
        return _call(draft, index, HOLE, frees), draft.bodies[index]
    wheres, body = together([draft.bodies[index] for draft, index in lot])
    calls = [
        (_call(draft, index, HOLE + place), where)
        for place, ((draft, index), where) in enumerate(zip(lot, wheres, strict=True))
    ]
    return to_worker.Batch(tuple(frees), calls), body


def _call(draft: Draft, index: int, seq: int, frees: Sequence[int] = ()) -> to_worker.Call:
    call = draft.call
    uses = bool(call.uses)
    observed = uses and bool(draft.crew.services.observers)
    return to_worker.Call(seq, draft.role.key, call.method, call.keep, draft.valid[index], uses, frees, observed)

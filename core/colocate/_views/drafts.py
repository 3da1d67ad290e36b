"""Drafts: calls that are ready, and how those of one group are sent together. A plain call is a draft by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from colocate._calls.pending import PendingCall
from colocate._calls.records import Ended
from colocate._crew.crew import Crew
from colocate._kept.kept import Hold, Kept
from colocate._protocol import to_worker
from colocate._protocol.bundle import together
from colocate._protocol.message import Head
from colocate._system.numbers import FOREVER_S


@attrs.define(eq=False)
class Draft:
    """A call that will be sent. `bodies` go along the call's targets, and so does `valid`."""

    crew: Crew
    call: PendingCall
    role: Any
    method: str
    bodies: Sequence[Any]
    valid: Sequence[int | None]
    timeout: float
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
    try:
        slots = dict.fromkeys(slot for draft in drafts for slot in draft.call.targets)
        crew.taught.before(slots, (body for draft in drafts for body in draft.bodies), [each.role for each in drafts])
        lots: dict[int, list[tuple[Draft, int]]] = {slot: [] for slot in slots}  # calls, and which of their bodies
        for draft in drafts:
            order.enter(draft.call)
            for index, slot in enumerate(draft.call.targets):
                lots[slot].append((draft, index))
        if crew.residents.news:
            if len(lots) == len(workers):
                frees = crew.residents.take()
            elif crew.declared.budgets:  # the calls may need the room
                crew.residents.tell()
        last: list[tuple[int, int | None, int]] = []
        frame: Any = None
        for slot, lot in lots.items():
            same = [(id(draft.bodies[index]), draft.valid[index], draft.call.seq) for draft, index in lot]
            if same != last:
                if frame is not None:
                    executor.discard(frame)
                frame, last = executor.frame(*_message(lot, frees)), same
            sent.append(slot)
            workers[slot].host.send(frame)
        executor.discard(frame)
    except BaseException as error:
        crew.residents.put_back(frees)
        for draft in drafts:
            order.give_up(draft.call, error, bool(sent))
        raise


def watch(drafts: Sequence[Draft]) -> None:
    """Give up on calls that were sent when their time is over; on a wake after those that have asked for it."""
    for draft in reversed(drafts):
        if draft.timeout < FOREVER_S:
            draft.crew.order.watch(draft.call, draft.timeout)


def _message(lot: Sequence[tuple[Draft, int]], frees: Sequence[int]) -> tuple[Head, Any]:
    """One message for all calls of one worker: its head and body."""
    if len(lot) == 1:
        ((draft, index),) = lot
        return _call(draft, index, frees).head(), draft.bodies[index]
    wheres, body = together([draft.bodies[index] for draft, index in lot])
    calls = [(_call(draft, index), where) for (draft, index), where in zip(lot, wheres, strict=True)]
    return to_worker.Batch(tuple(frees), calls).head(), body


def _call(draft: Draft, index: int, frees: Sequence[int] = ()) -> to_worker.Call:
    call, valid = draft.call, draft.valid[index]
    observed = bool(call.uses) and bool(draft.crew.services.observers)
    return to_worker.Call(call.seq, draft.role, draft.method, call.keep, valid, bool(call.uses), frees, observed)

"""Sending a call: it gets its place in the group's order and goes to its ranks, or to none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs

from colocate._dispatch import Plan
from colocate._joiner import Joiner
from colocate._method import MethodSpec
from colocate._numbers import FOREVER_S
from colocate._off_main import hand_over, off_main, on_main
from colocate._order import PendingCall
from colocate._owned import caller
from colocate._pipeline import Draft, recording, refuse_unsent
from colocate._resident import KeptResident, Reference

if TYPE_CHECKING:
    from colocate._group import ColocatedGroup
    from colocate._view import RoleInfo


@attrs.frozen(eq=False)
class Ready:
    """A call that is ready to be sent: `send` takes locks and changes state, so it isn't called on the main thread."""

    group: ColocatedGroup
    call: PendingCall
    role: RoleInfo
    spec: MethodSpec
    send: Callable[[], None]


def ready(
    group: ColocatedGroup,
    call: PendingCall,
    role: RoleInfo,
    spec: MethodSpec,
    planned: Plan,
    uses: list[Reference],
    timeout: float | None,
) -> Ready:
    """Have everything ready, on the caller's thread, for users' code runs meanwhile.

    Everything that can't be sent is found out before anything is.

    Args:
        group: The group.
        call: The call.
        role: Whose method it is.
        spec: The method.
        planned: How the arguments reach the ranks.
        uses: The residents among them.
        timeout: Seconds until it is given up; None for the runtime's default, `FOREVER_S` for never.
    """
    if timeout is None:
        timeout = group.runtime.call_timeout
    executor = group.runtime.executor
    codec = executor.codec
    bodies: dict[int, Any] = {}
    for arguments in planned.arguments:
        if id(arguments) not in bodies:
            bodies[id(arguments)] = codec.pack_arguments(cast("dict[str, Any]", arguments), call.label)
    call.uses = uses
    call.line = caller()
    group.taught.given.compare(call.line)
    call._joiner = Joiner(group, role, spec)
    if group.runtime.observers or uses:
        call.on_end = partial(_ended, group)
    found = recording(group)
    refuse_unsent(uses, call.label, found)
    if found is not None:
        group.check()
        packed = [bodies[id(arguments)] for arguments in planned.arguments]
        draft = Draft(group, call, role.key, call.method, packed, planned.valid, timeout)
        return Ready(group, call, role, spec, partial(found.add, draft, uses))
    return Ready(group, call, role, spec, partial(_send, group, call, role, planned, bodies, timeout))


def submit(ready: Ready) -> PendingCall:
    """Send a call to its ranks."""
    off_main(ready.send, waits_s=None)
    return ready.call


def start(ready: Ready) -> PendingCall:
    """As `submit`, for who waits for the call at once: that it can't be sent is its error then."""
    call = ready.call
    if not on_main():
        ready.send()
        return call

    def send_or_fail() -> None:
        try:
            ready.send()
        except BaseException as error:
            if not call.done():
                call.uses = ()  # none was lent
                ready.group.order.drop(call, error)

    hand_over(send_or_fail)
    return call


def keep(ready: Ready) -> KeptResident[Any]:
    """As `submit`, with the result staying in the workers. There is a handle from the moment when it is sent."""
    group, call = ready.group, ready.call
    call.keep = group.pool.base + group.runtime.new_key()
    found, scopes = recording(group), group.residents.here()

    def send_and_keep() -> KeptResident[Any]:
        ready.send()
        kept = group.kept(call, ready.role, ready.spec)
        group.residents.keep(kept, scopes)
        if found is not None:
            found.keep(kept)
        return KeptResident(kept)

    return off_main(send_and_keep, waits_s=None)


def _send(
    group: ColocatedGroup, call: PendingCall, role: RoleInfo, planned: Plan, bodies: dict[int, Any], timeout: float
) -> None:
    with group.order.lock:
        group.check()
        sent: list[int] = []
        try:
            _send_call(group, call, role, planned, bodies, sent)
        except BaseException as error:  # no descriptor or memory is left
            group.order.give_up(call, error, bool(sent))
            if call.keep is not None:
                group.residents.end(call.keep)
            raise
    if timeout < FOREVER_S:
        group.order.watch(call, timeout)


def _send_call(
    group: ColocatedGroup, call: PendingCall, role: RoleInfo, planned: Plan, bodies: dict[int, Any], sent: list[int]
) -> None:
    """Give a call its place in the order and send it. The order's lock is held; `sent` tells how far it came."""
    executor, workers = group.runtime.executor, group.workforce.workers
    group.taught.before(call.targets, bodies.values(), (role.key,))
    lent: list[Reference] = []
    uses, call.uses = call.uses, lent
    for use in uses:
        use._kept.group.residents.lend(call, use._kept, group)
        lent.append(use)
    seq = group.order.enter(call)
    frees = group.residents.take() if group.residents.news and len(call.targets) == len(workers) else ()
    last: tuple[Any, Any] = (None, None)
    frame: Any = None
    try:
        for slot, arguments, valid in zip(call.targets, planned.arguments, planned.valid, strict=True):
            if frame is None or last != (id(arguments), valid):
                if frame is not None:
                    executor.discard(frame)
                last = (id(arguments), valid)
                head = ("call", seq, role.key, call.method, call.keep, valid, bool(lent), frees)
                frame = executor.frame(head, bodies[id(arguments)])
            sent.append(slot)
            workers[slot].host.send(frame)
    except BaseException:
        group.residents.put_back(frees)
        raise
    executor.discard(frame)


def _ended(group: ColocatedGroup, call: PendingCall) -> None:
    """A call is about to be settled."""
    for use in call.uses:
        use._kept.group.residents.give_back(call, use._kept)
    call.uses = ()
    if group.runtime.observers and call.seq >= 0:  # otherwise it was never sent
        group.runtime.dispatcher.soon(lambda: group.runtime.observers.tell_call(group.name, call))

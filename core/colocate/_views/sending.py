"""Sending a call: it gets its place in the group's order and goes to its ranks, or to none."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, cast

from colocate._calls.joiner import Joiner
from colocate._calls.pending import PendingCall
from colocate._crew.crew import Crew
from colocate._definitions.apart import refuse_apart
from colocate._definitions.codec import pack
from colocate._definitions.packed import packed_bytes
from colocate._kept import Consumer, Kept, KeptResident, Reference
from colocate._role import context
from colocate._role.call import Resident, lives_on_driver
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._signals.at_work import at_work
from colocate._signals.off_main import hand_over, off_main, on_main
from colocate._system.by_type import by_type
from colocate._system.lines import place
from colocate._values.dispatch import Plan
from colocate._values.leaves import PLAIN, map_leaves
from colocate._values.nesting import has_attributes, has_fields, hides, kinds_inside, refuse_hidden
from colocate._views.drafts import Draft, Messages, settled, watch
from colocate._views.pipeline import Pipeline, recording, refuse_unsent
from colocate._views.waking import send
from colocate.errors import ColocateError

# A call's arguments may be millions of things, and on threads sending them costs nothing. What is so far inside them
# that this many others are nearer isn't refused there; a resident's reference still says what it is when it is used.
_LOOKS = 500


def ready(
    crew: Crew,
    call: PendingCall,
    role: RoleInfo,
    spec: MethodSpec,
    planned: Plan,
    uses: list[Reference],
    timeout: float | None,
    joiner: Joiner | None = None,
) -> Draft:
    """Have everything ready, on the caller's thread, for users' code runs meanwhile.

    Everything that can't be sent is found out before anything is.

    Args:
        crew: The group.
        call: The call.
        role: Whose method it is.
        spec: The method.
        planned: How the arguments reach the ranks.
        uses: The residents among them.
        timeout: Seconds until it is given up; None for the runtime's default, `FOREVER_S` for never.
        joiner: Makes its value; None to have one made.
    """
    services = crew.services
    codec = services.executor.codec
    bodies: dict[int, Any] = {}
    for arguments in planned.arguments:
        if id(arguments) not in bodies:
            body = bodies[id(arguments)] = codec.pack_arguments(cast("dict[str, Any]", arguments), call.label)
            if getattr(body, "has_trained", False):
                refuse_apart(arguments, (*body.needs, *pack(role.cls).needs), call.label)
    call.at = place(3)
    crew.taught.look(call, bodies.values())
    call.link = crew
    call._joiner = joiner or Joiner(crew, role, spec)
    pipeline = recording(crew)
    if uses:
        call.uses = uses
        refuse_unsent(uses, call.label, pipeline)
    packed = [bodies[id(arguments)] for arguments in planned.arguments]
    if services.observers:
        if not services.executor.in_process:
            call.sent = sum(map(packed_bytes, packed))
        call.on_end = partial(settled, crew)
    elif uses:
        call.on_end = partial(settled, crew)
    if timeout is None:
        timeout = services.call_timeout
    return Draft(crew, call, role, spec, packed, planned.valid, timeout, pipeline)


def submit(draft: Draft) -> PendingCall:
    """Send a call to its ranks."""
    if draft.pipeline is not None:
        draft.pipeline.add(draft)
    elif at_work():
        _send_soon(draft)
    elif not (messages := Messages((draft,))).post():
        off_main(lambda: _send(messages), waits_s=None)
    return draft.call


def start(draft: Draft) -> PendingCall:
    """As `submit`, for who waits for the call at once: that it can't be sent is its error then."""
    call = draft.call
    messages = Messages((draft,))
    if messages.post():
        return call
    if not on_main():
        _send(messages)
        return call

    def send_or_fail() -> None:
        try:
            _send(messages)
        except BaseException as error:
            draft.crew.order.drop(call, error)

    hand_over(send_or_fail)
    return call


def keep(draft: Draft) -> KeptResident[Any]:
    """As `submit`, with the result staying in the workers. There is a handle from the moment when it is sent."""
    crew, call = draft.crew, draft.call
    residents = crew.residents
    call.keep = crew.base + crew.services.new_key()
    scopes = residents.here()
    resident: KeptResident[Any] = KeptResident(residents, crew.source(call, draft.role, draft.spec), call)
    kept = resident._kept
    if draft.pipeline is not None:
        draft.pipeline.add(draft, kept)
    elif at_work():
        _send_soon(draft, kept)
    else:
        residents.add(kept)
        residents.flush_later()
        try:
            if not (messages := Messages((draft,))).post():
                off_main(lambda: _send(messages), waits_s=None)
        except BaseException as error:  # of a signal's handler, perhaps; if it is the call's, it is told here
            if call.seq < 0 or error is call._error:
                residents.forget_unsent(kept)
            raise
    residents.free_with(scopes, kept)
    return resident


def _send_soon(draft: Draft, kept: Kept | None = None) -> None:
    """Send a call that was made where the framework is at work, when that is over: as a pipeline of its own."""
    pipeline = Pipeline()
    pipeline.add(draft, kept)

    def end() -> None:
        with suppress(BaseException):  # which the call has been given
            pipeline.end()

    draft.crew.services.timers.soon(end)


def _send(messages: Messages) -> None:
    (draft,) = messages.drafts
    crew, call = draft.crew, draft.call
    try:
        with crew.order.lock:
            crew.check()
            draft.lend()
            sent = send(messages)
    except BaseException as error:
        crew.order.drop(call, error)  # unless that was done
        raise
    finally:
        messages.discard()
    watch(sent)


def refuse_inside(label: str, group: str) -> None:
    """Refuse a call from role code."""
    if (inside := context.current()) is not None and inside.hosted:
        who = f"role {inside.role!r}" if inside.role is not None else "a function of group.run"
        raise ColocateError(
            f"{who} called {label} of group {group!r} from inside a worker: it would wait for a lane that waits "
            "for it. Call it from the driver; a role of this slot is ctx.sibling(...)"
        )


def with_references(
    arguments: dict[str, Any], crew: Crew, consumer: Consumer, label: str, uses: list[Reference]
) -> dict[str, Any]:
    """The arguments with references, bound to their consumer, in place of residents; `uses` gets them."""

    def look_inside(item: Any) -> None:
        if hides(item, lives_on_driver):
            refuse_hidden(arguments, label, lives_on_driver, _why_not_inside)

    def leaf(item: Any) -> Any:
        if not lives_on_driver(type(item)):
            look_inside(item)
            return item
        if isinstance(item, Resident):
            item = item.ref
        if not isinstance(item, Reference):
            raise TypeError(f"{label}: {item!r} lives on the driver and can't be an argument")
        residents = item._residents
        residents.use(item._kept, crew)
        if residents.link.services is not crew.services:
            raise ColocateError(
                f"resident of {item._kept.source.label} belongs to another runtime; fetch() it and pass the value"
            )
        bound = item.bound(consumer)
        uses.append(bound)
        return bound

    made, odd = {}, {}
    for name, value in arguments.items():
        if type(value) in PLAIN:
            made[name] = value
            continue
        if lives_on_driver(type(value)):
            made[name] = leaf(value)
            continue
        kinds = kinds_inside(value)
        matters = _matters if any(map(lives_on_driver, kinds)) else lives_on_driver
        made[name] = map_leaves(value, leaf, matters, look_inside)
        if any(map(has_attributes, kinds)):
            odd[name] = value
    refuse_hidden(odd, label, lives_on_driver, _why_not_inside, looks=_LOOKS)
    return made


def _why_not_inside(item: Any, holder: str) -> str:
    if isinstance(item, Resident | Reference):
        return (
            f"inside a {holder}, where nothing puts its value in its place. Residents are found in lists, tuples and "
            "the values of dicts: pass it so, or as an argument of its own"
        )
    return f"inside a {holder}, and lives on the driver. {item._instead}"


@by_type
def _matters(kind: type) -> bool:
    """Whether a value of this type is, or may hide, something that lives on the driver."""
    return lives_on_driver(kind) or has_fields(kind)

"""The model of the laws: the right results, the errors that a fault may cause, and the order of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.chaos import rollouts, training
from tests.chaos.machine import CHANGED, digest_after, size_of
from tests.chaos.programs import BACKGROUND, PEERS
from tests.chaos.records import Applied, PlayedGroup, Sent, chain, history, leaves, short

from colocate._calls.order import HAS_LEFT
from colocate.errors import (
    CallTimeout,
    ChildDied,
    ClosedError,
    ClusterError,
    ColocateError,
    GroupRestarted,
    RenewalError,
    RoleError,
    RoleStartError,
    StaleWeightsError,
    WorkerDied,
)

DEADLY = ("kill", "lane", "keeper", "envoy")  # faults that end a worker
HANGING = ("stop", "gil")  # faults after which a worker doesn't answer, and lives

# Files in the stack of a rank that requests a part of a value from a peer, or waits until a peer has taken weights.
AT_A_PEER = ("colocate/worker/residents/peers.py", "colocate/features/weights/worker.py")
_ABORTED = "was aborted: group.pause"
AMPLE_S = 1.0  # a grace in which every rank without a fault ends


def complaints(played: Sequence[PlayedGroup], applied: Applied | None) -> list[str]:
    """Return all violations of the laws in one episode."""
    found: list[str] = []
    for group in played:
        mine = applied if applied is not None and concerns(applied, group) else None
        for sent in group.sent:
            hit = mine if sent.generation == group.struck else None
            if sent.giver is not None and applied is not None and concerns(applied, sent.giver):
                hit = applied
            found += (f"{group.name}: {sent}: {words}" for words in _of_call(sent, group, hit))
        found += (f"{group.name}: {words}" for words in order(group))
        found += (f"{group.name}: {words}" for words in training.complaints(group))
        found += (f"{group.name}: {words}" for words in rollouts.complaints(group))
        found += (f"{group.name}: {words}" for words in group.wrong)
        found += (f"{group.name}: {words}" for words in _of_spawn(group, mine))
        found += (f"{group.name}: {words}" for words in _of_close(group, mine))
    return found


def concerns(applied: Applied, group: PlayedGroup) -> bool:
    """Return whether a fault hit this group; the end of the envoy hits all groups."""
    return applied.kind == "envoy" or (applied.group == group.index and applied.name in ("", group.name))


# -- calls


def _of_call(sent: Sent, group: PlayedGroup, mine: Applied | None) -> Iterator[str]:
    if sent.settled is None:
        yield "was never settled"
        return
    if sent.error is None:
        if sent.fails:
            yield f"should have raised on rank {sent.fails}, but gave {sent.value!r}"
        elif sent.times_out:
            yield f"should have timed out, but gave {sent.value!r}"
        elif (wrong := sent.expected(sent.value)) is not None:
            yield f"wrong result: {wrong}"
        elif mine is not None and mine.kind == "kill" and mine.rank in sent.ranks and sent.submitted > mine.done:
            yield f"succeeded although rank {mine.rank} had been killed before"
        elif sent.role != BACKGROUND and (step := training.torn_by(sent, group)) is not None:
            yield f"succeeded although {step} had left ranks without a common state"
        return
    if not allowed(sent, sent.error, group, mine):
        stacks = sent.error.stacks if isinstance(sent.error, CallTimeout) else {}
        where = "".join(f"\nrank {rank}: {stack}" for rank, stack in stacks.items())
        yield f"ended with {short(sent.error)}{where}"


def allowed(sent: Sent, error: BaseException, group: PlayedGroup, mine: Applied | None) -> bool:
    """Return whether a call may end with this error."""
    if isinstance(error, GroupRestarted):
        return group.restarts and error.__cause__ is not None and allowed(sent, error.__cause__, group, mine)
    if sent.fails and sent.is_told_by(error):
        return True
    if sent.aborted and isinstance(error, RoleError) and _ABORTED in str(error):
        return True
    if sent.what == "pause" and type(error) is TimeoutError:
        return mine is not None and mine.kind in HANGING
    if isinstance(error, StaleWeightsError):
        return rollouts.may_be_stale(sent, group)
    if isinstance(error, ChildDied):
        return rollouts.is_bereaved(sent, error.rank, group)
    if isinstance(error, RenewalError):
        return training.explains(error, sent, group)
    if sent.times_out and isinstance(error, CallTimeout):
        return set(error.stacks) <= set(sent.ranks)
    if isinstance(error, CallTimeout) and _is_behind_a_sync(sent, group):
        return True
    if isinstance(error, ClosedError) or _all_have_left(error):
        closings = [each.closing for each in (group, sent.giver) if each is not None and each.closing is not None]
        return sent.settled is not None and any(sent.settled >= closing for closing in closings)
    over = mine is not None and mine.went_on is not None and sent.submitted > mine.went_on
    if mine is not None and not over and may_follow(error, mine):
        return True
    return _follows(sent, error, group) or (mine is not None and not over and _is_held(sent, error, group, mine))


def _all_have_left(error: BaseException) -> bool:
    """Return whether a call timed out because all late ranks had left with their group."""
    return isinstance(error, CallTimeout) and set(error.stacks.values()) == {HAS_LEFT}


def _is_behind_a_sync(sent: Sent, group: PlayedGroup) -> bool:
    """Return whether an earlier sync timed out on another group's weights."""
    return any(
        each.giver not in (None, group) and each.ident < sent.ident and isinstance(each.error, CallTimeout)
        for each in group.sent
    )


def _follows(sent: Sent, error: BaseException, group: PlayedGroup) -> bool:
    """Return whether a call that waits for other ranks was withdrawn with the error of an earlier call."""
    waits = ("take", "add", "train", "sleep", "wake", "weights", "play", "each", "talk", "talk_async")
    if sent.what not in waits or not isinstance(error, RoleError):
        return False
    calls = [*group.sent, *(sent.giver.sent if sent.giver is not None else ())]
    earlier = [each.error for each in calls if each.ident < sent.ident and each.error is not None]
    return any(cause == each for cause in chain(error)[1:] for each in earlier)  # each waiting call has a copy


def _is_held(sent: Sent, error: BaseException, group: PlayedGroup, fault: Applied) -> bool:
    """Return whether a call's ranks were held: an earlier call has failed, and the hanging rank can't return."""
    return (
        fault.kind in HANGING
        and isinstance(error, CallTimeout)
        and bool(error.stacks)
        and all(stack.startswith(("idle", "running nothing")) for stack in error.stacks.values())
        and any(each.error is not None for each in group.sent if each.ident < sent.ident)
    )


def may_follow(error: BaseException, fault: Applied) -> bool:
    if fault.kind in DEADLY:
        return is_death(error, fault)
    if fault.kind in PEERS:
        # A connection that is dropped during its setup, or refused, isn't reported as a peer's.
        words = ("peer", "before it was authenticated", "nobody listens at")
        return isinstance(error, RoleError) and any(each in str(error) for each in words)
    if isinstance(error, CallTimeout):
        # The hit rank may have ended its own share, while other ranks wait for its part of a value.
        waits = [any(file in stack for file in AT_A_PEER) for stack in error.stacks.values()]
        return fault.rank in error.stacks or (bool(waits) and all(waits))
    # The group has failed because a rank didn't return from an abandoned call: the error names the rank and the cause.
    return (
        isinstance(error, RoleError)
        and error.rank == fault.rank
        and "after a failed call; its stack:" in str(error)
        and any(isinstance(cause, CallTimeout) or _ABORTED in str(cause) for cause in chain(error)[1:])
    )


def is_death(error: BaseException, fault: Applied) -> bool:
    if fault.kind == "envoy":
        return isinstance(error, WorkerDied | ClusterError)
    if not isinstance(error, WorkerDied) or error.rank != fault.rank:
        return False
    # A starting worker may have forked another process, below its supervisor, after the fault looked at the pid.
    if fault.pid and fault.moment != "spawn" and error.pid not in (None, fault.pid, fault.below):
        return False
    return fault.kind != "kill" or error.signal == "SIGKILL"


# -- order


def order(group: PlayedGroup) -> Iterator[str]:
    """Yield each rank that didn't begin its calls once and in order of submission, or that lost a successful call.

    After a restart the calls are those of the new generation, and the calls before the checkpoint.
    """
    last: dict[str, tuple[int, ...]] = {}
    for sent in group.sent:
        if not sent.fine or not isinstance(sent.value, list):
            continue
        for nonce, rank, notes, _ in (seen for seen in sent.value if isinstance(seen, tuple) and len(seen) == 4):
            known = [each for each in history(group, sent.generation) if each.noted == sent.noted]
            by_ident = {each.ident: each for each in known}
            yield from (f"{sent} on rank {rank}: {words}" for words in _of_notes(sent, rank, notes, by_ident, known))
            before = last.get(nonce, ())
            if notes[: len(before)] != before:
                yield f"{sent} on rank {rank}: the calls begun before it were {before}, now they are {notes}"
            last[nonce] = notes


def _of_notes(
    sent: Sent, rank: int, notes: tuple[int, ...], by_ident: dict[int, Sent], calls: Sequence[Sent]
) -> Iterator[str]:
    slot = sent.ranks[rank] if rank < len(sent.ranks) else rank
    if list(notes) != sorted(set(notes)):
        yield f"out of order, or twice: {notes}"
    if sent.ident not in notes:
        yield f"it isn't among the calls that its worker has begun: {notes}"
    for ident in notes:
        other = by_ident.get(ident)
        if other is None:
            yield f"it has begun call {ident}, which is another group's, or role's, or generation's"
    for other in calls:
        if other.ident >= sent.ident:
            break
        if other.fine and slot in other.ranks and other.ident not in notes:
            yield f"{other} had succeeded, and is lost: {notes}"


# -- spawn and close


def _of_spawn(group: PlayedGroup, mine: Applied | None) -> Iterator[str]:
    error = group.spawn_error
    if error is None:
        return
    if mine is None:
        # A start with a hanging rank has a short timeout, which on a busy machine is too short for all ranks.
        late = error.errors.values() if group.hurried and isinstance(error, RoleStartError) else ()
        if late and all("in time" in str(each) for each in late):
            return
        yield f"spawn failed: {short(error)}"
    elif mine.kind == "envoy":
        if not isinstance(error, ColocateError):
            yield f"spawn failed: {short(error)}"
    elif not isinstance(error, RoleStartError):
        if not (isinstance(error, WorkerDied) and is_death(error, mine)):
            yield f"spawn failed: {short(error)}"
    elif mine.rank not in error.errors:
        yield f"spawn didn't name rank {mine.rank}, but {sorted(error.errors)}: {short(error)}"
    elif mine.kind in DEADLY and not is_death(error.errors[mine.rank], mine):
        yield f"spawn says of rank {mine.rank}: {short(error.errors[mine.rank])}"


def _of_close(group: PlayedGroup, mine: Applied | None) -> Iterator[str]:
    for error in group.close_errors:
        for leaf in leaves(error):
            if not _told_by_close(leaf, group, mine):
                yield f"close raised {short(leaf)}"
    if must_complain(group, mine) and not group.close_errors:
        assert mine is not None
        yield f"close said nothing of rank {mine.rank}, which hung"


def must_complain(group: PlayedGroup, mine: Applied | None) -> bool:
    """Return whether the close must report a rank that hung, because no call has reported the group's failure."""
    return (
        mine is not None
        and mine.kind in HANGING
        and mine.went_on is None
        and group.spawn_error is None
        and group.generation == group.struck
        and group.closing is not None
        and mine.done < group.closing
        and not any(
            isinstance(sent.error, RoleError) and "after a failed call; its stack:" in str(sent.error)
            for sent in group.sent
        )
    )


def _told_by_close(leaf: BaseException, group: PlayedGroup, mine: Applied | None) -> bool:
    if any(isinstance(sent.error, BaseException) and leaf == sent.error for sent in group.sent):
        return True  # of an unused kept call: judged with that call
    if isinstance(leaf, RoleError) and "did not end within" in str(leaf):
        # Any rank may need a moment, to leave a wait for the hanging rank, or because the machine is busy.
        return group.grace < AMPLE_S or (mine is not None and mine.kind in HANGING and leaf.rank == mine.rank)
    return mine is not None and may_follow(leaf, mine)


def seen_by(expected: Sequence[tuple[int, Any]]) -> Any:
    """Return a check of each rank's value: (rank, value) in order of ranks."""

    def look(value: Any) -> str | None:
        try:
            told = [(rank, own) for _, rank, _, own in value]
        except (TypeError, ValueError):
            return f"{value!r:.200} is no list of what ranks have seen"
        return None if told == list(expected) else f"{told!r:.200} instead of {list(expected)!r:.200}"

    return look


def as_written(group: PlayedGroup, role: str, ranks: int) -> Callable[[Any], str | None]:
    """Return a check that a role's memory on each rank is the work of the calls that the rank has begun."""

    def look(value: Any) -> str | None:
        writers = {sent.ident for sent in group.sent if sent.role == role and sent.writes}
        for _, rank, notes, digest in value:
            if digest != digest_after(role, rank, [ident for ident in notes if ident in writers]):
                return f"role {role!r} has, on rank {rank}, {CHANGED}: after {notes}"
        found = [rank for _, rank, _, _ in value]
        return None if found == list(range(ranks)) else f"{value!r:.200} isn't what {ranks} ranks have"

    return look


def within(budget: int) -> Callable[[Any], str | None]:
    """Return a check that each slot's awake memory fits the budget, and that no role lacks memory."""

    def look(memory: Any) -> str | None:
        for slot in memory.slots:
            awake = {role.role: role.total for role in slot.roles}
            if sum(awake.values()) > budget:
                return f"on slot {slot.slot} {awake} are awake, and {budget} bytes may be"
            roles = [role for role in slot.roles if role.role]  # residents of functions have no role
            missing = [role.role for role in roles if role.total + role.asleep < size_of(role.role)]
            if missing:
                return f"on slot {slot.slot} {', '.join(missing)} have less than they have: {memory}"
        return None

    return look

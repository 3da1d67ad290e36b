"""The laws of order and of the hold: one order of calls on all ranks, and the outcomes of calls when some fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import pytest
from hypothesis import event, given, settings, strategies as st

import colocate
from colocate import Call, CallTimeout, ColocatedGroup, ColocateError, Resident, RoleError

from .reused import Reused
from .scripted import Boom, Cut, Meetings, Order, Scripted

WITHIN_S = 60.0
SLOTS = {"all": (0, 1, 2), "two": (0, 2)}


@attrs.frozen
class Action:
    """One call of a program: its role, method and ranks."""

    role: str
    what: str
    order: Order
    ranks: Sequence[int]
    uses: int | None = None
    timeout: float | None = None


@attrs.define
class Outcome:
    """The outcome of an action."""

    action: Action
    call: Call[Any] | None = None
    resident: Resident[Any] | None = None
    error: BaseException | None = None
    value: Any = None


@st.composite
def programs(draw: Any) -> list[Action]:
    actions: list[Action] = []
    for number in range(draw(st.integers(2, 10))):
        role = draw(st.sampled_from(list(SLOTS)))
        everywhere = tuple(range(len(SLOTS[role])))
        makers = [i for i, action in enumerate(actions) if action.what == "make"]
        what = draw(st.sampled_from(["plain", "meet", "overlapping", "make", *(["use"] * 2 if makers else [])]))
        some = draw(st.lists(st.sampled_from(everywhere), min_size=1, unique=True).map(sorted))
        ranks = tuple(some) if what in ("plain", "overlapping") else everywhere
        fails = draw(st.sampled_from([(), (), *((rank,) for rank in ranks), ranks]))
        slow = draw(st.dictionaries(st.sampled_from(ranks), st.sampled_from([1, 5, 20]), max_size=1))
        order = Order(number, tuple(fails), draw(st.booleans()), slow)
        uses = draw(st.sampled_from(makers)) if what == "use" else None
        actions.append(Action(role, what, order, ranks, uses, draw(st.sampled_from([None, None, None, 0.005]))))
    return actions


def submit(group: ColocatedGroup, action: Action, before: Sequence[Outcome]) -> Outcome:
    outcome = Outcome(action)
    method = getattr(group.role(action.role), action.what)
    somewhere = action.ranks if action.what in ("plain", "overlapping") else None
    method = method.options(ranks=somewhere, timeout=action.timeout)
    try:
        if action.what == "make":
            outcome.resident = method.keep(action.order)
        elif action.uses is None:
            outcome.call = method.submit(action.order)
        else:
            made = before[action.uses].resident
            assert made is not None, before[action.uses].error
            outcome.call = method.submit(action.order, made.ref)
    except (RoleError, CallTimeout) as error:  # The argument's call has already failed.
        outcome.error = error
    return outcome


def finish(outcome: Outcome) -> None:
    """Wait for an outcome, which must come."""
    try:
        if outcome.call is not None:
            outcome.value = outcome.call.result(WITHIN_S)
        elif outcome.resident is not None:
            outcome.value = outcome.resident.fetch()
    except ColocateError as error:
        outcome.error = error


def run(group: ColocatedGroup, program: Sequence[Action]) -> None:
    outcomes: list[Outcome] = []
    for action in program:
        outcomes.append(submit(group, action, outcomes))
    for outcome in outcomes:
        finish(outcome)
    journals = group.role("all", Scripted).read()
    check_order(journals, program)
    for outcome in outcomes:
        check(outcome, outcomes, journals)
    check_that_it_goes_on(group, len(program))


def check_that_it_goes_on(group: ColocatedGroup, call: int) -> None:
    """Check that later calls work on all ranks, and that their collectives pair the right calls."""
    for role, slots in SLOTS.items():
        ranks = tuple(range(len(slots)))
        for what in ("plain", "meet", "overlapping"):
            action = Action(role, what, Order(call), ranks)
            assert getattr(group.role(role), what)(action.order) == wanted(action, [])
            call += 1
    group.role("all", Scripted).read()


def check_order(journals: Sequence[Sequence[int]], program: Sequence[Action]) -> None:
    """Check that every slot has begun only its own calls, each once, in the order of submission."""
    for slot, journal in enumerate(journals):
        its = [a.order.call for a in program if slot in {SLOTS[a.role][rank] for rank in a.ranks}]
        assert list(journal) == sorted(set(journal)), f"slot {slot} has begun {journal}"
        assert set(journal) <= set(its)


def check(outcome: Outcome, outcomes: Sequence[Outcome], journals: Sequence[Sequence[int]]) -> None:
    action, order = outcome.action, outcome.action.order
    begun = [rank for rank in action.ranks if order.call in journals[SLOTS[action.role][rank]]]
    source = None if action.uses is None else outcomes[action.uses]
    lost = source is not None and source.error is not None  # The argument was never made.
    if outcome.error is None:
        assert not order.fails, f"{action} went well"
        assert not lost, f"{action} went well without what it uses"
        assert begun == list(action.ranks), f"{action} went well without running on all of its ranks"
        assert outcome.value == wanted(action, outcomes), f"{action} gave {outcome.value}"
        event(f"{action.what} went well")
        return
    assert isinstance(outcome.error, RoleError | CallTimeout), f"{action}: {outcome.error!r}"
    cause = outcome.error.__cause__
    if source is not None and source.error is not None and str(outcome.error) == str(source.error):
        event("could not use what was not made")
    elif isinstance(outcome.error, CallTimeout):
        assert action.timeout is not None
        event(f"{action.what} was late")
    elif isinstance(cause, Boom):
        call, rank = cause.args
        assert (call, rank) == (order.call, outcome.error.rank)
        assert rank in order.fails
        assert rank in begun
        event(f"{action.what} failed")
    else:
        # A rank had already begun this call, which failed there after an earlier one.
        assert begun or action.what == "use", f"{action} was not begun anywhere and failed: {outcome.error!r}"
        assert order.fails or action.what in ("meet", "use"), f"{action} had no reason to fail: {outcome.error!r}"
        # An own error names the earlier failure in its text; a consequence has that failure as its cause.
        earlier = [other.error for other in outcomes[: order.call] if isinstance(other.error, ColocateError)]
        assert any(
            str(error) == str(cause) or (isinstance(cause, Cut) and f": {error.message})" in str(outcome.error))
            for error in earlier
        ), f"{action}: {outcome.error!r} from {cause!r}"
        event(f"{action.what} had begun and failed")


def wanted(action: Action, outcomes: Sequence[Outcome]) -> Any:
    """Return the value of a successful call."""
    call, ranks = action.order.call, action.ranks
    if action.what == "meet":
        return [call * len(ranks)] * len(ranks)
    if action.what == "make":
        return [item for rank in ranks for item in (call, rank)]
    if action.uses is not None:
        return [wanted(outcomes[action.uses].action, outcomes)] * len(ranks)
    return [(call, rank) for rank in ranks]


def spawn(stack: ExitStack, executor: str) -> tuple[ColocatedGroup, Meetings | None]:
    meetings = Meetings() if executor == "threads" else None
    runtime = stack.enter_context(colocate.connect("local", processes=executor == "processes"))
    pool = stack.enter_context(runtime.reserve(slots=3))
    roles = {role: colocate.role(Scripted, meetings).on(slots=slots) for role, slots in SLOTS.items()}
    group = pool.spawn(roles, name="scripted")
    if meetings is not None:
        meetings.group = group
    return group, meetings


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_calls_keep_one_order_and_none_is_lost(executor: str, examples: dict[str, int]) -> None:
    """Calls submitted without waiting begin in one order on all ranks, and each gets its result or its error."""
    with Reused(lambda stack: spawn(stack, executor)) as spawned:

        @settings(max_examples=examples[executor])
        @given(programs())
        def law(program: list[Action]) -> None:
            with spawned() as (group, meetings):
                if meetings is not None:
                    meetings.reset()
                run(group, program)

        law()


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_one_order_of_several_threads(executor: str) -> None:
    """Calls of several threads run in one order on all ranks, which keeps each thread's own order."""
    with ExitStack() as stack:
        group, _ = spawn(stack, executor)
        view, numbers = group.role("all", Scripted), range(40)

        def one(thread: int) -> None:
            for number in numbers:
                calls.append(view.plain.submit(Order(thread * 1000 + number)))

        calls: list[Call[Any]] = []
        threads = [threading.Thread(target=one, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for call in calls:
            call.result(WITHIN_S)
        journals = view.read()
    assert all(journal == journals[0] for journal in journals)
    for own in range(4):
        assert [call for call in journals[0] if call // 1000 == own] == [own * 1000 + n for n in numbers]

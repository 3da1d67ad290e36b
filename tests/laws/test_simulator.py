"""The laws of order, hold and cancelling, on the state machines of both halves; mutants test the simulator."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.laws import simulator
from tests.laws.simulator import BrokenLaw, Link

from colocate._calls.order import CallOrder, Hold
from colocate.features.process_groups import driver
from colocate.features.process_groups.driver import GroupsOfGroup, HoldState
from colocate.features.process_groups.messages import LeftGroups, RankReport
from colocate.features.process_groups.usable import UsableGroups
from colocate.worker import lane_order
from colocate.worker.lane_order import LaneOrder

LONGER = int(os.environ.get("COLOCATE_LAWS", "1"))  # See tests/laws/conftest.py.
FOUND_WITHIN = 3000  # Programs; a fault shows within some hundred.


def test_order_and_hold() -> None:
    """Under any schedule each call ends with the right outcome, ranks pair the right calls, and later calls work."""
    _programs(0 if LONGER == 1 else random.getrandbits(32), 1500 * LONGER)


def _programs(first: int, count: int) -> None:
    for seed in range(first, first + count):
        try:
            simulator.run(seed)
        except BrokenLaw as broken:
            broken.add_note(f"tests.laws.simulator.run({seed})")
            raise


Wrap = Callable[[Any], Any]


def _nothing(_: Any) -> Any:
    return lambda *args, **kwargs: None


def _forgets_withdrawn(does: Any) -> Any:
    def failed(self: CallOrder, slot: int, failed: Any, body: Any) -> None:
        hold = self._holds.get(failed.lane)
        before = set() if hold is None else set(hold.withdrawn)
        does(self, slot, failed, body)
        if (hold := self._holds.get(failed.lane)) is not None:
            hold.withdrawn &= before | {hold.failed}

    return failed


def _forgets_pending(does: Any) -> Any:
    def fail_all(self: CallOrder, error: Any) -> bool:
        self.pending.clear()
        return False

    return fail_all


def _limits_nothing(does: Any) -> Any:
    def hold(self: LaneOrder, number: int, failed: int) -> Any:
        self._last_hold = max(self._last_hold, number)
        return lane_order.Hold(number)

    return hold


def _does_not_look_again(does: Any) -> Any:
    def begins(self: LaneOrder, call: Any, overlapping: int) -> bool:
        self.running[call.seq] = call
        self._last_begun = call.seq
        return True

    return begins


def _is_back_too_early(does: Any) -> Any:
    def back(self: LaneOrder, overlapping: int) -> Any:
        if self.last_reported >= self._last_hold:
            return None
        self.last_reported = self._last_hold
        return self._last_hold, self._last_begun

    return back


def _drops_later(does: Any) -> Any:
    def resume(self: CallOrder, hold: Hold) -> None:
        hold.later.clear()
        does(self, hold)

    return resume


def _does_not_wait_for_all(does: Any) -> Any:
    def phase_over(self: CallOrder, slot: int, number: int, error: Any) -> None:
        if (hold := self._holds.get("")) is not None and hold.number == number:
            hold.waiting.clear()
        does(self, slot, number, error)

    return phase_over


def _disturbs(does: Any) -> Any:
    def break_off(self: CallOrder, call: Any, error: Any) -> None:
        if (hold := self._holds.get(call.lane)) is not None:
            hold.phase = None
        does(self, call, error)

    return break_off


def _forgets_failed(does: Any) -> Any:
    def tell_ended(self: CallOrder, slot: int, seq: int, told: Any) -> None:
        if seq in self.pending:
            does(self, slot, seq, told)

    return tell_ended


def _keeps_what_it_heard(does: Any) -> Any:
    def back(self: UsableGroups, hold: int) -> None:
        self.epoch = hold

    return back


def _whole(plain: Any) -> Any:
    return None if plain is None else RankReport(*plain)._replace(cuts=())


def _unless_left(does: Any) -> Any:
    return lambda self, slots, message: None if isinstance(message, LeftGroups) else does(self, slots, message)


MUTANTS: dict[str, tuple[Any, str, Wrap]] = {
    "process groups outlive a failed call": (HoldState, "broken_groups", lambda does: lambda self: []),
    "what was cut isn't noted": (
        GroupsOfGroup,
        "on_rank_halted",
        lambda does: lambda self, hold, slot, plain, is_back: does(self, hold, slot, _whole(plain), is_back),
    ),
    "groups are dropped only where they were cut": (
        HoldState,
        "broken_groups",
        lambda does: lambda self: sorted(self.cut),
    ),
    "who is done doesn't miss those that haven't begun": (driver, "find_stranded", lambda does: lambda *_: ()),
    "one rank's renewal is all ranks'": (CallOrder, "finish_phase", _does_not_wait_for_all),
    "a renewal that raised is none": (
        CallOrder,
        "finish_phase",
        lambda does: lambda self, slot, number, error: does(self, slot, number),
    ),
    "who is late disturbs a renewal": (CallOrder, "abort_call", _disturbs),
    "models that differ go on": (driver, "find_diverged", _nothing),
    "updates of a call that has failed aren't noted": (CallOrder, "_report_call_end", _forgets_failed),
    "who waits in vain cuts nothing": (UsableGroups, "find_hopeless", lambda does: lambda self, begun, members: set()),
    "who cuts knows nothing of operations": (
        UsableGroups,
        "find_hopeless",
        lambda does: lambda self, begun, members: set(begun) if self._left_slots else set(),
    ),
    "what was heard of ranks outlives a hold": (UsableGroups, "on_back", _keeps_what_it_heard),
    "what ranks say late counts in the next hold": (
        UsableGroups,
        "on_peer_left",
        lambda does: lambda self, hold, slot, told: does(self, self.epoch + 1, slot, told),
    ),
    "a call that failed after another isn't withdrawn": (CallOrder, "on_call_failed", _forgets_withdrawn),
    "a hold isn't lowered to an earlier call": (CallOrder, "_lower_failed", _nothing),
    "nobody hears that a rank has left": (Link, "send", _unless_left),
    "what failed later isn't told": (CallOrder, "_finish_hold", _drops_later),
    "calls of a group that fails are forgotten": (CallOrder, "fail_all", _forgets_pending),
    "a hold limits nothing": (LaneOrder, "hold", _limits_nothing),
    "a rank that failed goes on": (LaneOrder, "on_failed", _nothing),
    "what begins isn't looked at again": (LaneOrder, "begin_call", _does_not_look_again),
    "a rank is back before earlier calls": (LaneOrder, "take_hold_report", _is_back_too_early),
    "withdrawn calls are begun": (LaneOrder, "_drop_calls", _nothing),
    "a sync call is no barrier": (LaneOrder, "_can_begin", lambda does: lambda self, call, n: does(self, call, 0)),
    "a pause limits nothing": (LaneOrder, "pause", lambda does: lambda self, number: self._last_begun),
    "a pause rests while calls go on": (LaneOrder, "take_rest_report", lambda does: lambda self, n: does(self, 0)),
    "the end of a pause ends the next one": (LaneOrder, "_end_pauses", lambda does: lambda self, n: does(self, n + 99)),
    "what comes before a pause is different on each rank": (
        LaneOrder,
        "_get_place",
        lambda does: lambda self, call: call.seq if len(self._waiting) % 2 else does(self, call),
    ),
    "a call may be withdrawn though it was begun": (LaneOrder, "defer_call", lambda does: lambda *_: does(*_) or True),
    "nobody hears how a cancelling was decided": (CallOrder, "on_cancel_vote", _nothing),
    "a call is dropped that a rank has begun": (
        CallOrder,
        "on_cancel_vote",
        lambda does: lambda self, slot, answer: does(self, slot, type(answer)(answer.token, True)),
    ),
}


# First seeds for mutants that few programs reveal: shortly before the program that does.
LATE = {
    "a rank that failed goes on": 550,
    "a pause limits nothing": 1800,
    "a pause rests while calls go on": 1700,
    "the end of a pause ends the next one": 2400,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    """The simulator finds each mutant of either half."""
    owner, name, wrap = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    with pytest.raises(BrokenLaw):
        _programs(LATE.get(mutant, 0), FOUND_WITHIN)

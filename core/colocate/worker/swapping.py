"""Roles that take turns within a budget: who makes room when one is called that sleeps, so that the least is copied.

The order in which a step calls its roles is the same again and again, so it is known what is needed next. With few
roles the cheapest way through the step is searched for, otherwise who is needed last makes room, and where no order is
known, who was called longest ago.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, count, islice, repeat
from operator import itemgetter
from typing import NamedTuple

_FEW = 6
_AHEAD = 3
"""Steps that are looked ahead, at least: where the first begins is given, and the others are as all will be."""
_USES_AHEAD = 128
"""Uses that are looked ahead, at least: what one step saves may be worth what it costs to come to that after many."""
_SHORTEST = 2
_LONGEST = 64
"""Turns of a step at most; what comes again after more isn't looked for."""


class Use(NamedTuple):
    """A role's turn in a step.

    Attributes:
        role: The role.
        writes: Whether its memory is written then, so that its copy is out of date.
    """

    role: str
    writes: bool


class State(NamedTuple):
    """Who is awake, and who of them has been written into since it was last copied."""

    awake: frozenset[str]
    dirty: frozenset[str]


class Room(NamedTuple):
    """What there is room for.

    Attributes:
        nbytes: What roles may have together.
        sizes: What each has.
        needs: What each needs besides, while it runs.
    """

    nbytes: int
    sizes: Mapping[str, int]
    needs: Mapping[str, int]

    def over(self, awake: Iterable[str], runs: str) -> int:
        """The bytes that are too many when these roles are awake and one of them runs."""
        return sum(self.sizes[role] for role in awake) + self.needs.get(runs, 0) - self.nbytes


def cost(step: Sequence[Use], room: Room, start: State, end: frozenset[str] | None = None) -> int | None:
    """The bytes that the cheapest way through a step copies; None where there is none.

    Args:
        step: The uses.
        room: What there is room for.
        start: Who is awake before it.
        end: Who is to be awake after it; None for anybody.
    """
    found = _way(step, room, start, end)
    return None if found is None else found[0]


def who_goes(step: Sequence[Use], room: Room, state: State) -> frozenset[str] | None:
    """Who makes room for the first use of a step that is gone through again and again; None where there is no room.

    Args:
        step: The uses of one step, from the one that is about to come.
        room: What there is room for.
        state: Who is awake.
    """
    if len({use.role for use in step} | state.awake) > _FEW:
        return by_next_use(step, room, state)
    steps = max(_AHEAD, math.ceil(_USES_AHEAD / len(step)))
    found = _way(list(step) * steps, room, state, None)
    return None if found is None else found[1]


def by_next_use(step: Sequence[Use], room: Room, state: State) -> frozenset[str] | None:
    """The same for many roles: who is needed last makes room; who has to be copied on its way out, too, goes later.

    Sizes don't matter: as much room as a role makes is copied for it. To weigh by them copies a tenth more.
    """
    role = step[0].role
    places = {use.role: place for place, use in reversed(list(enumerate(step)))}

    def gain(other: str) -> float:
        return places.get(other, len(step)) / (2 if other in state.dirty else 1)

    return _until_it_fits(sorted(state.awake - {role}, key=gain, reverse=True), role, room, state)


def by_last_use(order: Sequence[str], role: str, room: Room, state: State) -> frozenset[str] | None:
    """Who makes room for a role where no order is known: who was called longest ago.

    Args:
        order: Roles, the one that was called last at the end.
        role: The role that is about to be called.
        room: What there is room for.
        state: Who is awake.
    """
    last = {each: place for place, each in enumerate(order)}
    return _until_it_fits(sorted(state.awake - {role}, key=lambda each: last.get(each, -1)), role, room, state)


def _until_it_fits(goers: Sequence[str], role: str, room: Room, state: State) -> frozenset[str] | None:
    going: set[str] = set()
    awake = state.awake | {role}
    for each in goers:
        if room.over(awake - going, role) <= 0:
            break
        going.add(each)
    if room.over(awake - going, role) > 0:
        return None
    for each in sorted(going, key=lambda other: room.sizes[other], reverse=True):  # some of them may do
        if room.over(awake - going | {each}, role) <= 0:
            going.discard(each)
    return frozenset(going)


def _way(
    uses: Sequence[Use], room: Room, start: State, end: frozenset[str] | None
) -> tuple[int, frozenset[str]] | None:
    """What the cheapest way through some uses copies, and who goes at its first one."""
    order = count()
    todo: list[tuple[int, int, int, State, frozenset[str]]] = [(0, next(order), 0, start, frozenset())]
    done: set[tuple[int, State]] = set()
    known: dict[tuple[Use, State], list[tuple[frozenset[str], int, State]]] = {}  # nearly all come again and again
    while todo:
        copied, _, place, state, first = heapq.heappop(todo)
        if (place, state) in done:
            continue
        done.add((place, state))
        if place == len(uses) + (end is not None):
            return copied, first
        if place == len(uses):
            assert end is not None
            more = sum(room.sizes[role] for role in (state.dirty - end) | (end - state.awake))
            heapq.heappush(todo, (copied + more, next(order), place + 1, State(end, frozenset()), first))
            continue
        if (now := (uses[place], state)) not in known:
            known[now] = list(_choices(uses[place], room, state))
        for going, more, then in known[now]:
            heapq.heappush(todo, (copied + more, next(order), place + 1, then, going if place == 0 else first))
    return None


def _choices(use: Use, room: Room, state: State) -> Iterator[tuple[frozenset[str], int, State]]:
    """Who may go at a use, what that copies, and how it is then.

    Nobody goes who needn't: it could still go later, for the same.
    """
    role = use.role
    coming = 0 if role in state.awake else room.sizes[role]
    awake = state.awake | {role}
    excess = room.over(awake, role)
    others = sorted(state.awake - {role})
    enough: list[frozenset[str]] = []
    for number in range(len(others) + 1 if excess > 0 else 1):
        for each in combinations(others, number):
            if sum(map(room.sizes.__getitem__, each)) < excess:
                continue
            going = frozenset(each)
            if any(map(going.issuperset, enough)):
                continue
            enough.append(going)
            out = sum(room.sizes[other] for other in going & state.dirty)
            dirty = state.dirty - going
            yield going, coming + out, State(awake - going, dirty | {role} if use.writes else dirty)


class Order:
    """The order in which roles are called, as far as it is known.

    What has been gone through twice is a step. There may be several: what is done again and again inside of a step
    looks like one, too. The one counts that explains most of what was called last; where a role is written into each
    second time only, say, it is as long as it takes until that comes again, too.
    """

    def __init__(self, declared: Sequence[str] = ()) -> None:
        """Args: declared: The roles of a step."""
        self._step = [Use(role, True) for role in _apart(declared)]
        self._declared = bool(declared)
        self._place: int | None = None  # of the use that is on
        self._past: list[Use] = []
        self._roles = _Again(lambda use: use.role)
        self._uses = _Again(lambda use: use)  # with whether they write: those that are over

    @property
    def recent(self) -> list[str]:
        """Roles, the one that was called last at the end."""
        return list(dict.fromkeys(use.role for use in reversed(self._past)))[::-1]

    def begins(self, role: str) -> bool:
        """A role is about to be called; whether its turn begins with that."""
        if self._past and self._past[-1].role == role:
            return False
        if self._past:
            self._is_over(self._past[-1])
        self._past.append(Use(role, False))
        del self._past[: -2 * _LONGEST]
        after = None if self._place is None else (self._place + 1) % len(self._step)
        if after is not None and self._step[after].role == role:
            self._place, self._roles.foreseen = after, self._roles.foreseen + 1
        else:
            self._place, self._roles.foreseen = self._placed(role)
        if not self._declared:
            self._find()
        self._lengthen()
        return True

    def wrote(self, role: str) -> None:
        """A role has been written into: it matters when it is its turn."""
        if self._past and self._past[-1].role == role:
            self._past[-1] = self._past[-1]._replace(writes=True)

    def ahead(self) -> list[Use] | None:
        """The uses of one step from the one that is on; None where they aren't known."""
        if self._place is None:
            return None
        return self._step[self._place :] + self._step[: self._place]

    def _placed(self, role: str) -> tuple[int | None, int]:
        """Where in the step this is: where most of the uses before it were the same; and how many are, with it."""
        step = self._step
        places = [at for at, use in enumerate(step) if use.role == role]
        past = [use.role for use in self._past]

        def alike(at: int) -> int:
            pairs = zip(reversed(past), (step[(at - back) % len(step)].role for back in count()), strict=False)
            return next((number for number, (one, other) in enumerate(pairs) if one != other), len(past))

        place = max(places, key=alike, default=None)
        return place, 0 if place is None else alike(place)

    def _is_over(self, use: Use) -> None:
        """The last use is."""
        self._uses.look(self._past)
        if self._place is not None:
            self._uses.foreseen = self._uses.foreseen + 1 if self._step[self._place] == use else 0
            self._step[self._place] = use  # as it was this time, it will be

    def _find(self) -> None:
        """Have a step be what comes again, if that explains more."""
        self._roles.look(self._past)
        if length := self._roles.better():
            # It begins where it was found, so the use that is on is its last. How that was is known of the first.
            self._step, self._place = self._past[-2 * length : -length], length - 1
            self._roles.take(length)
            self._uses.take(length)

    def _lengthen(self) -> None:
        """Have several steps be one, where those alone come again as they were, also in who was written into."""
        if self._place is None:
            return
        if length := self._uses.better(lambda each: each < self._roles.foreseen and not each % len(self._step)):
            self._step, self._place = self._past[-1 - length : -1], 0
            self._uses.take(length)


class _Again:
    """How many of the last uses are like others, in a row.

    Attributes:
        foreseen: Like those that the step has there.
    """

    def __init__(self, what: Callable[[Use], object]) -> None:
        """Args: what: In what they are to be alike."""
        self._what = what
        self.foreseen = 0
        self._repeated: list[int] = []  # like those of so many before, from the shortest step on

    def look(self, past: Sequence[Use]) -> None:
        """There is one more."""
        last = self._what(past[-1])
        before = islice(reversed(past), _SHORTEST, _LONGEST + 1)
        together = zip(before, chain(self._repeated, repeat(0)), strict=False)
        self._repeated = [number + 1 if self._what(use) == last else 0 for use, number in together]

    def better(self, may: Callable[[int], bool] = lambda length: True) -> int:
        """How long a step is that explains more of them than the present one; 0 if none does.

        Args:
            may: Whether a step may be as long as that.
        """
        twice = ((number, length) for length, number in enumerate(self._repeated, _SHORTEST) if number >= length)
        allowed = (each for each in twice if may(each[1]))
        number, length = max(allowed, key=itemgetter(0), default=(0, 0))  # the shortest of those
        return length if number > self.foreseen else 0

    def take(self, length: int) -> None:
        """The step is one that is as long as that."""
        self.foreseen = self._repeated[length - _SHORTEST]


def _apart(roles: Sequence[str]) -> list[str]:
    """Without those that follow themselves, from the last one to the first as well."""
    found = [role for before, role in zip((None, *roles), roles, strict=False) if role != before]
    return found[:-1] if len(found) > 1 and found[0] == found[-1] else found

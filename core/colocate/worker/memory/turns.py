"""Who of a worker's roles makes room for another one when they take turns: whose next turn is farthest.

The order in which a step calls its roles is the same again and again, so it is known what is needed next (Belady 1966);
where it isn't known, who was called longest ago goes. `residency.py` has them go and come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice, repeat

from colocate._protocol.ledger import TAGS, Purpose
from colocate._role.budget import Limit
from colocate.worker.memory.accounts import Accounts
from colocate.worker.memory.ledger import Shares
from colocate.worker.memory.site import Worker
from colocate.worker.memory.sleeping import Sleeper

_SHORTEST = 2
_LONGEST = 64
"""Turns of a step at most; what comes again after more isn't looked for."""


class Order:
    """The order in which roles are called, as far as it is known.

    What has been gone through twice is a step. What is done again and again inside of a step looks like one, too: the
    one counts that explains most of what was called last.
    """

    def __init__(self, declared: Sequence[str] = ()) -> None:
        """Args: declared: The roles of a step, where somebody has said that."""
        found = [role for before, role in zip((None, *declared), declared, strict=False) if role != before]
        self._step = found[:-1] if len(found) > 1 and found[0] == found[-1] else found
        self._declared = bool(declared)
        self._place: int | None = None  # of the turn that is on
        self._past: list[str] = []
        self._runs: list[int] = []  # how many of the last turns are like those of so many before, from the shortest on

    def begins(self, role: str) -> bool:
        """Return whether a role's turn begins as it is called."""
        past = self._past
        if past and past[-1] == role:
            return False
        before = islice(reversed(past), _SHORTEST - 1, _LONGEST)
        together = zip(before, chain(self._runs, repeat(0)), strict=False)
        self._runs = [run + 1 if each == role else 0 for each, run in together]
        past.append(role)
        del past[: -2 * _LONGEST]
        alike = self._find_place()
        twice = [(run, -length) for length, run in enumerate(self._runs, _SHORTEST) if run >= length]
        if not self._declared and twice and max(twice)[0] > alike:
            length = -max(twice)[1]
            self._step, self._place = past[-length:], length - 1
        return True

    def ahead(self) -> Sequence[str] | None:
        """Return the turns of one step from the one that is on; None where they aren't known."""
        return None if self._place is None else [*self._step[self._place :], *self._step[: self._place]]

    def by_need(self, roles: Iterable[str], ahead: Sequence[str] | None) -> list[str]:
        """Return roles, the one that is needed last first; see `ahead`."""
        if ahead is not None:
            places = {role: place for place, role in reversed([*enumerate(ahead)])}
            return sorted(roles, key=lambda role: (-places.get(role, len(ahead)), role))
        last = {role: place for place, role in enumerate(self._past)}
        return sorted(roles, key=lambda role: (last.get(role, -1), role))

    def _find_place(self) -> int:
        """Have the turn that is on be where most of those before it are alike in the step; return how many are."""
        step, past = self._step, self._past

        def alike(at: int) -> int:
            pairs = zip(reversed(past), (step[(at - back) % len(step)] for back in range(len(past))), strict=True)
            return next((number for number, (one, other) in enumerate(pairs) if one != other), len(past))

        self._place = max((at for at, role in enumerate(step) if role == past[-1]), key=alike, default=None)
        return 0 if self._place is None else alike(self._place)


def until_it_fits(goers: Iterable[str], sizes: Mapping[str, int], excess: int) -> frozenset[str] | None:
    """Return the first of some roles that make room for so many bytes together, without those that needn't go.

    None where all of them don't.
    """
    going: list[str] = []
    for each in goers:
        if excess <= 0:
            break
        going.append(each)
        excess -= sizes[each]
    if excess > 0:
        return None
    for each in sorted(going, key=sizes.__getitem__, reverse=True):  # some of them may do
        if excess + sizes[each] <= 0:
            going.remove(each)
            excess += sizes[each]
    return frozenset(going)


class Turns:
    """What is known of the roles' turns.

    Attributes:
        order: In which they come.
        limit: What all may have together.
    """

    def __init__(self, site: Worker, sleeper: Sleeper, accounts: Accounts) -> None:
        """Args: accounts: With the budgets."""
        self._site = site
        self._sleeper = sleeper
        self._accounts = accounts
        budgets = accounts.budgets
        self.order = Order()
        self.limit = min((each for each in budgets.limits if each.role is None and each.device), key=_nbytes)
        self._declared: Sequence[str] = budgets.step
        self._peaks: dict[str, int] = {}  # what roles have had at most

    def begins(self, name: str) -> bool:
        """Return whether a role's turn begins as it is called."""
        if self._declared:  # roles that live on other slots have no turn here
            self.order = Order([each for each in self._declared if each in self._site.roles])
            self._declared = ()
        return self.order.begins(name)

    def note(self, name: str, shares: Shares) -> None:
        """What a role has come to hold."""
        self._peaks[name] = max(self._peaks.get(name, 0), self._size(name, shares))

    def awake(self, name: str, shares: Shares) -> int:
        """The bytes of a role that could go."""
        here = self._site.boot.device
        owned = shares.owned.get(name, {})
        return sum(size for (kind, where), size in owned.items() if where == here and kind != _RESIDENTS)

    def over(self, shares: Shares, name: str | None) -> int:
        """The bytes that are too many, while a role runs."""
        activations = self._accounts.budgets.activations.get(name or "", 0)
        return self._accounts.used(shares, self.limit) + activations - self.limit.nbytes

    def growth(self, name: str, shares: Shares) -> int:
        """What a role has had besides what it has: gradients, say, that it has let go of."""
        return max(0, self._peaks.get(name, 0) - self._size(name, shares))

    def goers(self, shares: Shares, name: str | None, stay: frozenset[str], coming: int = 0) -> Iterable[str]:
        """Who is to make room next, so that a role can run; all who can where nothing else helps.

        Who sleeps may have come to hold something since, or have it to itself only now: nobody else helps any more. Nor
        does it count who has what another one has, too, where that begins elsewhere (a part of an array).
        """
        goers = self.choice(shares, name or "", stay, coming, self.order.ahead())
        if goers is None:
            goers = frozenset(self._candidates(shares, stay))
        others = [each for each in self._names() if each not in stay]
        holders = {each for each in others if self.awake(each, shares)}
        return goers or holders or {each for each in others if self._may_go(each)}

    def choice(
        self, shares: Shares, runs: str, stay: frozenset[str], coming: int, ahead: Sequence[str] | None
    ) -> frozenset[str] | None:
        """Who is to make room for a role; None where that doesn't help.

        Args:
            shares: What all have.
            runs: The role; "" for a function.
            stay: Who can't.
            coming: What comes to the role.
            ahead: The turns of one step from the role's on, where they are known.
        """
        candidates = self._candidates(shares, stay)
        if not candidates:
            return frozenset()
        if ahead is not None and ahead[0] != runs:
            ahead = None
        sizes = {each: self.awake(each, shares) or self._size(each, shares) for each in candidates}
        # What several hold counts with one of them: it goes when all do.
        excess = self.over(shares, runs) + coming + (self.growth(runs, shares) if runs else 0)
        excess += sum(sizes[each] - self.awake(each, shares) for each in candidates)
        return until_it_fits(self.order.by_need(candidates - {runs}, ahead), sizes, excess)

    def moves_ahead(self, name: str) -> bool:
        """Whether a role's memory may go and come while another one runs: no code of it has to.

        What keeps its addresses goes when the device has done all that it had to, for which must not be waited while
        somebody captures a graph.
        """
        return not self._site.roles[name].keeps_addresses and not self._is_told(name)

    def _may_go(self, name: str) -> bool:
        """Whether a role may be put to sleep of which nothing counts: not where it would be told of it."""
        return len(self._sleeper.asleep.tags(name)) < len(TAGS) and not self._is_told(name)

    def _is_told(self, name: str) -> bool:
        """Whether a role has means of its own to sleep or to wake, which are its code."""
        return any(self._site.roles[name].hook(each) is not None for each in ("sleep", "wake"))

    def _size(self, name: str, shares: Shares) -> int:
        """The bytes of a role that could go, with what sleeps of it."""
        return self.awake(name, shares) + shares.asleep.get(name, 0)

    def _candidates(self, shares: Shares, stay: frozenset[str]) -> set[str]:
        """Who can make room.

        What several hold counts with one of them, and stays as long as another one is awake.
        """
        return {
            each
            for each in self._names()
            if each not in stay
            and (self.awake(each, shares) or shares.shared.get(each))
            and len(self._sleeper.asleep.tags(each)) < len(TAGS)
        }

    def _names(self) -> list[str]:
        return [each.name for each in list(self._site.roles.values()) if each.name is not None]


_RESIDENTS = Purpose.RESIDENTS.word


def _nbytes(limit: Limit) -> int:
    return limit.nbytes

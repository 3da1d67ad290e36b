"""Who of a worker's roles makes room for another one when they take turns: by what they hold, and when they run.

The rule is in `swapping.py`; `residency.py` has them go and come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from colocate._protocol.ledger import TAGS, Purpose
from colocate._role.budget import Limit
from colocate.worker.accounts import Accounts
from colocate.worker.ledger import Shares
from colocate.worker.memory_site import Worker
from colocate.worker.sleeping import Sleeper
from colocate.worker.swapping import Order, Room, State, Use, by_last_use, who_goes


class Turns:
    """What is known of the roles' turns.

    Attributes:
        order: In which they come.
        limit: What all may have together.
        copied: Whose copies are up to date.
    """

    def __init__(self, site: Worker, sleeper: Sleeper, accounts: Accounts) -> None:
        """Args: accounts: With the budgets."""
        self._site = site
        self._sleeper = sleeper
        self._accounts = accounts
        budgets = accounts.budgets
        self.order = Order()
        self.limit = min((each for each in budgets.limits if each.role is None and each.device), key=_nbytes)
        self.copied: set[str] = set()
        self._declared: Sequence[str] = budgets.step
        self._peaks: dict[str, int] = {}  # what roles have had at most
        self._written: dict[str, int] = {}  # how often their tensors had been, when that was last looked at

    def begins(self, name: str) -> bool:
        """A role is called: whether its turn begins with that."""
        if self._declared:  # roles that live on other slots have no turn here
            self.order = Order([each for each in self._declared if each in self._site.roles])
            self._declared = ()
        return self.order.begins(name)

    def writes(self, name: str) -> bool:
        """Whether a role that is about to run will be written into, as far as anybody knows."""
        ahead = self.order.ahead()
        return ahead is None or ahead[0].role != name or ahead[0].writes

    def note(self, name: str, shares: Shares) -> None:
        """What a role has come to hold, and whether it was written into."""
        self._peaks[name] = max(self._peaks.get(name, 0), self.size(name, shares))
        written = self._accounts.written(name)
        if self._written.get(name) != written:
            self._written[name] = written
            self.copied.discard(name)
            self.order.wrote(name)

    def awake(self, name: str, shares: Shares) -> int:
        """The bytes of a role that could go."""
        here = self._site.boot.device
        owned = shares.owned.get(name, {})
        return sum(size for (kind, where), size in owned.items() if where == here and kind != _RESIDENTS)

    def size(self, name: str, shares: Shares) -> int:
        """The same, with what sleeps of it."""
        return self.awake(name, shares) + shares.asleep.get(name, 0)

    def over(self, shares: Shares, name: str | None) -> int:
        """The bytes that are too many, while a role runs."""
        activations = self._accounts.budgets.activations.get(name or "", 0)
        return self._accounts.used(shares, self.limit) + activations - self.limit.nbytes

    def growth(self, name: str, shares: Shares) -> int:
        """What a role has had besides what it has: gradients, say, that it has let go of."""
        return max(0, self._peaks.get(name, 0) - self.size(name, shares))

    def goers(self, shares: Shares, name: str | None, stay: frozenset[str], coming: int = 0) -> Iterable[str]:
        """Who is to make room next, so that a role can run; all who can where nothing else helps.

        Who sleeps may have come to hold something since, or have it to itself only now: nobody else helps any more. Nor
        does it count who has what another one has, too, where that begins elsewhere (a part of an array).
        """
        ahead = self.order.ahead()
        goers = self.choice(shares, name or "", stay, coming, ahead)
        if goers is None:
            goers = frozenset(self._candidates(shares, stay))
        others = [each for each in self._names() if each not in stay]
        holders = {each for each in others if self.awake(each, shares)}
        return goers or holders or {each for each in others if self._may_go(each)}

    def _may_go(self, name: str) -> bool:
        """Whether a role may be put to sleep of which nothing counts: not where it would be told of it."""
        return len(self._sleeper.asleep.tags(name)) < len(TAGS) and not self._is_told(name)

    def _is_told(self, name: str) -> bool:
        """Whether a role has means of its own to sleep or to wake, which are its code."""
        return any(self._site.roles[name].hook(each) is not None for each in ("sleep", "wake"))

    def moves_ahead(self, name: str) -> bool:
        """Whether a role's memory may go and come while another one runs: no code of it has to.

        What keeps its addresses goes when the device has done all that it had to, for which must not be waited while
        somebody captures a graph.
        """
        return not self._site.roles[name].keeps_addresses and not self._is_told(name)

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

    def choice(
        self,
        shares: Shares,
        runs: str,
        stay: frozenset[str],
        coming: int,
        ahead: Sequence[Use] | None,
        writes: bool = False,
    ) -> frozenset[str] | None:
        """Who is to make room for a role; None where that doesn't help.

        Args:
            shares: What all have.
            runs: The role; "" for a function.
            stay: Who can't.
            coming: What comes to the role.
            ahead: The uses of one step from the role's on, where they are known.
            writes: Whether the step's last use, which is on, writes.
        """
        roles = self._names()
        awake = {each: self.awake(each, shares) for each in roles}
        candidates = self._candidates(shares, stay)
        if not candidates:
            return frozenset()
        moving = candidates | {runs}
        sizes = {each: awake[each] or self.size(each, shares) for each in roles}
        sizes[runs] = awake.get(runs, 0) + coming
        fixed = self._accounts.used(shares, self.limit) - sum(awake.get(each, 0) for each in moving)
        needs = dict(self._accounts.budgets.activations)
        if runs:
            needs[runs] = needs.get(runs, 0) + self.growth(runs, shares)
        room = Room(self.limit.nbytes - fixed, sizes, needs)
        dirty = moving - self.copied
        if writes and ahead is not None:
            dirty |= {ahead[-1].role} & moving
        state = State(frozenset(moving), frozenset(dirty))
        if ahead is not None and ahead[0].role == runs:
            return who_goes([use for use in ahead if use.role in moving or use.role not in stay], room, state)
        return by_last_use(self.order.recent, runs, room, state)


_RESIDENTS = Purpose.RESIDENTS.word


def _nbytes(limit: Limit) -> int:
    return limit.nbytes

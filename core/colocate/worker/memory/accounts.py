"""What the roles of a worker hold, beside what they may: whether that is too much, as soon as it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from colocate._protocol.ledger import Purpose
from colocate._role.budget import NO_BUDGETS, Budgets, Limit
from colocate._system.numbers import size_text
from colocate.errors import MemoryBudgetError, RoleError
from colocate.worker.memory.gradients import Gradients
from colocate.worker.memory.holdings import Holdings
from colocate.worker.memory.ledger import LookError, Shares, look_at, shares_of
from colocate.worker.memory.site import Worker
from colocate.worker.memory.sleeping import Sleeper


class Accounts:
    """What the roles of a worker have beside what they may have, on the lane.

    A role is looked at when something may have changed what it holds: its own methods, functions, a sleep, a wake.

    Attributes:
        budgets: What they may have.
    """

    def __init__(self, site: Worker, sleeper: Sleeper, gradients: Gradients) -> None:
        self._site = site
        self._sleeper = sleeper
        self._gradients = gradients
        sleeper.refuse_more = self.refuse_more
        self._held: dict[str, Holdings] = {}
        self._changed: set[str] = set()
        self.budgets: Budgets = NO_BUDGETS

    def changed(self, role: str | None) -> None:
        """What a role holds may have changed; None for any of them."""
        names = [each.name for each in list(self._site.roles.values()) if each.name is not None]
        if role is None:
            self._changed.update(names)
        elif role in self._site.roles:
            self._changed.update({role, *self._site.roles[role].ctx._asked})

    def moved(self, role: str) -> None:
        """Memory of a role sleeps, or is there again."""
        self.changed(role)
        self._gradients.moved(role)

    def look(self, role: str | None, more: Mapping[str, Any] | None = None) -> Shares:
        """What all roles have, where one of them may have changed that.

        Args:
            role: That role; None for any.
            more: Values that are about to be kept, by the method that has made them.

        Raises:
            RoleError: Something of it can't be looked at.
        """
        self.changed(role)
        return self.shares(more)

    def shares(self, more: Mapping[str, Any] | None = None) -> Shares:
        """What all roles have; who may have come to hold something else is looked at anew.

        Args:
            more: Values that are about to be kept, by the method that has made them.

        Raises:
            RoleError: Something of it can't be looked at.
        """
        try:
            names = [each.name for each in list(self._site.roles.values()) if each.name is not None]
            changed = [name for name in names if name in self._changed or name not in self._held]
            for name in changed:
                self._held[name], _ = look_at(self._site, name)
                self._changed.discard(name)
            return shares_of(self._site, self._sleeper, self._held, more)
        except LookError as error:
            raise RoleError(
                f"what role {error.role!r} holds could not be looked at: {error.trace.strip().splitlines()[-1]}"
            ) from error

    def judge(self, role: str | None, what: str, shares: Shares) -> None:
        """Raise when the roles have more than they may.

        Args:
            role: The role that has just run; None for a function.
            what: What it has run.
            shares: What all have.

        Raises:
            MemoryBudgetError: They have.
        """
        for limit in self.budgets.limits:
            if role is not None and limit.role not in (None, role):
                continue
            activations = self.budgets.activations.get(role or "", 0) if limit.device else 0
            if self.used(shares, limit) + activations > limit.nbytes:
                kept = f", with {size_text(activations)} to stay free for activations" if activations else ""
                raise self.exceeded(shares, limit, f"after {what}{kept}", activations)

    def refuse_more(self, role: str, nbytes: int, device: bool, wakes: bool) -> None:
        """Raise when there is no room for what a role that sleeps or wakes is about to have besides.

        Args:
            role: The role.
            nbytes: So many bytes.
            device: Whether of the device; else of the host.
            wakes: Whether it wakes.

        Raises:
            MemoryBudgetError: There is none.
        """
        # What it may have itself when it is awake is judged after its calls: else it could never let go of something.
        whose = (None,) if wakes else (None, role)
        limits = [each for each in self.budgets.limits if each.device is device and each.role in whose]
        if not (limits and nbytes):
            return
        what = f"waking role {role!r}" if wakes else f"putting role {role!r} to sleep"
        shares = self.look(role)
        for limit in limits:
            over = self.used(shares, limit) + nbytes > limit.nbytes
            if over and not (wakes and self.has_outgrown(shares, role, limit, nbytes)):
                raise self.exceeded(shares, limit, f"{what} needs {size_text(nbytes)}", nbytes)

    def has_outgrown(self, shares: Shares, role: str, limit: Limit, nbytes: int) -> bool:
        """Whether a role that wakes is more than a limit allows by itself, and nobody else has what could go.

        It wakes all the same, and its calls are judged when they have run, as before it slept: one may let go of
        something. Else nobody would ever come to what it holds.

        Args:
            shares: What all have.
            role: The role.
            limit: The limit.
            nbytes: What comes to it, and is to stay free for it.
        """
        return self._used_by(shares, role, limit.device) + nbytes > limit.nbytes and not any(
            self._has_what_could_go(shares, other, limit.device) for other in shares.owned if other != role
        )

    def _has_what_could_go(self, shares: Shares, role: str, device: bool) -> bool:
        has = sum(size for kind, size in self._parts(shares, role, device) if kind != Purpose.RESIDENTS.word)
        return has > sum(self._sleeper.asleep.kept_awake(role).values())

    def used(self, shares: Shares, limit: Limit) -> int:
        """Bytes that count towards a limit."""
        roles = shares.owned.keys() | shares.asleep.keys() if limit.role is None else {limit.role}
        return sum(self._used_by(shares, role, limit.device) for role in roles)

    def exceeded(self, shares: Shares, limit: Limit, what: str, more: int) -> MemoryBudgetError:
        """The error that a limit is exceeded, or would be.

        Args:
            shares: What all have.
            limit: The limit.
            what: By what.
            more: The bytes that are to be free beside what all have.
        """
        place = self._site.boot.device if limit.device else "the host"
        used = self.used(shares, limit)
        roles = shares.owned.keys() | shares.asleep.keys()
        told = "; ".join(filter(None, [self._told(shares, role, limit.device) for role in sorted(roles)]))
        return MemoryBudgetError(
            f"{what}, {size_text(used)} of {place} are in use, and {limit.owner} may have {size_text(limit.nbytes)} "
            f"({limit.word}): {size_text(used + more - limit.nbytes)} too much. Who has it: {told or 'nobody'}. "
            f"{self._cure(limit)}"
        )

    def _cure(self, limit: Limit) -> str:
        """What whoever exceeds a limit can do."""
        if not limit.device:
            return "What sleeps counts, too: let go of something, or allow more"
        if limit.role is not None or self.budgets.swap:
            return "Let go of something, or allow more"
        turns = "have a role sleep (group.sleep), let roles take turns (residency='swap')"
        return f"Let go of something, {turns}, or allow more"

    def told(self) -> str:
        """Who has how much, as a note to an error says it."""
        shares = self.look(None)
        places = (False,) if self._site.boot.device == "cpu" else (True, False)
        told = [self._told(shares, each, device) for each in shares.owned for device in places]
        return f"memory of this worker: {'; '.join(filter(None, told)) or 'nothing that its roles hold'}"

    def _used_by(self, shares: Shares, role: str, device: bool) -> int:
        return sum(size for _, size in self._parts(shares, role, device))

    def _parts(self, shares: Shares, role: str, device: bool) -> Iterable[tuple[str, int]]:
        """What a role has, by kind. What sleeps somewhere counts with the host's memory."""
        here = self._site.boot.device
        for (kind, where), size in shares.owned.get(role, {}).items():
            if (where == here) if device else (where == "cpu"):
                yield kind, size
        if not device and (asleep := shares.asleep.get(role, 0) - shares.emptied.get(role, 0)):
            yield "asleep", asleep

    def _told(self, shares: Shares, role: str, device: bool) -> str:
        parts = dict(self._parts(shares, role, device))
        if not parts:
            return ""
        order = [*(purpose.word for purpose in Purpose), "asleep"]
        kinds = ", ".join(f"{kind} {size_text(parts[kind])}" for kind in order if kind in parts)
        stays = self._sleeper.asleep.kept_awake(role) if device else {}
        but = ", ".join(f"{size_text(size)} {why}" for why, size in stays.items())
        why = f", asleep but for {but}" if but else ""
        return f"{role or 'functions'} {size_text(sum(parts.values()))} ({kinds}){why}"

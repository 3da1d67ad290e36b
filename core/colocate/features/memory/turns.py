"""Turns of a worker's roles within a memory budget (`residency="swap"`): idle roles sleep while another role runs.

Each worker decides for itself, on the lane. Results don't depend on the place of a role's memory, so ranks needn't
agree. Before a call, idle roles are put to sleep and the called role is woken. If the role grows in the call, more
roles are put to sleep afterwards.

If the order of calls in a step was declared, the role with the farthest next turn sleeps first (Belady 1966),
otherwise the least recently called role.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from colocate._protocol.consequence import Consequence
from colocate._protocol.ledger import TAGS, Purpose
from colocate._role.budget import Limit
from colocate._role.context import running_call
from colocate._role.method_spec import MethodSpec
from colocate._system.jobs import format_error
from colocate._system.numbers import format_size
from colocate.errors import MemoryBudgetError, SleepingError
from colocate.features.memory.ledger import Accounts, Shares
from colocate.features.memory.messages import MemoryMoved
from colocate.features.memory.sleep import RestorePlan, Sleeper, explain_error, is_lack_of_room
from colocate.worker.context import WorkerContext, get_roles_by_name
from colocate.worker.serving.role_instance import RoleInstance

_ALL = tuple(TAGS)
_TOLD_BY_THEMSELVES = ("sleep", "wake")
"""Functions that report their moves themselves, and are no calls of a user."""


class RoleOrder:
    """Predicts which role is needed last, from the declared step or from past calls."""

    def __init__(self, declared: Sequence[str] = ()) -> None:
        """Start before the first call of a step. `declared` has the roles of the step in order."""
        order = [role for before, role in zip((None, *declared), declared, strict=False) if role != before]
        self._step = order[:-1] if len(order) > 1 and order[0] == order[-1] else order
        self._position = -1  # The index of the current turn in the step.
        self._history: dict[str, None] = {}  # All roles called so far, from the least to the most recent call.

    def start_turn(self, role: str) -> None:
        """Record a call of a role, which starts the role's turn."""
        if next(reversed(self._history), None) != role:
            self._history.pop(role, None)
            self._history[role] = None
            if role in self._step:
                self._position = (self._position + 1 + self._upcoming().index(role)) % len(self._step)

    def sort_by_need(self, roles: Iterable[str]) -> list[str]:
        """Sort roles so that the role needed last comes first."""
        if turns := self._upcoming():
            places = {role: place for place, role in reversed([*enumerate(turns)])}
            return sorted(roles, key=lambda role: (-places.get(role, len(turns)), role))
        last = {role: place for place, role in enumerate(self._history)}
        return sorted(roles, key=lambda role: (last.get(role, -1), role))

    def _upcoming(self) -> Sequence[str]:
        """Return the next turns in their order, for one full step. The current turn is the last."""
        return [*self._step[self._position + 1 :], *self._step[: self._position + 1]]


@attrs.define
class _CallUse:
    """A record that a call or a block needs certain roles awake.

    Attributes:
        awake: The roles that must stay awake.
        is_call: Whether a user's call needs the roles.
    """

    awake: frozenset[str] = frozenset()
    is_call: bool = False


class TurnScheduler:
    """Wakes the roles of a worker for calls, and keeps the memory of all roles within the budget.

    Attributes:
        takes_turns: Whether roles take turns.
    """

    _limits: Sequence[Limit]  # The limits on all roles together, set if roles take turns.

    def __init__(self, worker_context: WorkerContext, sleeper: Sleeper, accounts: Accounts) -> None:
        self._worker_context = worker_context
        self._sleeper = sleeper
        self._accounts = accounts
        self.takes_turns = False
        self._order = RoleOrder()
        self._declared_order: Sequence[str] = ()
        self._peaks: dict[str, int] = {}  # The largest size of each role so far, in bytes.
        self._uses: dict[object, _CallUse] = {}  # The key is a call's number, or the name of a role used by a block.
        self._known_sizes: set[tuple[str, str]] = set()  # The role and the name of each method that has run before.

    def set_budgets(self) -> None:
        """Read the settings from the memory budgets."""
        budgets = self._accounts.budgets
        self.takes_turns, self._declared_order = budgets.swap, budgets.step
        if budgets.swap:
            limits = [each for each in budgets.limits if each.role is None and each.device]
            private_limits = sorted((each for each in limits if not each.is_shared), key=lambda each: each.nbytes)
            self._limits = [*private_limits[:1], *(each for each in limits if each.is_shared)]

    # -- around calls

    @contextlib.contextmanager
    def free_for_construction(self, name: str) -> Iterator[None]:
        """A context manager that offloads all other roles while a role's constructor runs, if roles take turns.

        The size of the new role is still unknown.
        """
        with self._holding(name):
            if self.takes_turns:
                self._evict_unneeded(name)
            yield

    def enter_call(self, seq: int, role: RoleInstance, spec: MethodSpec) -> None:
        """Wake the memory that a method needs. Called before the method runs."""
        if not self.takes_turns:
            return
        use = self._uses[seq] = _CallUse(is_call=role.name is not None or spec.name not in _TOLD_BY_THEMSELVES)
        name = role.name
        if name is None:
            return
        if spec.awake == ():
            return
        tags = _ALL if spec.awake is None else spec.awake
        if self._declared_order:  # Roles on other slots have no turn in this worker.
            self._order = RoleOrder([other for other in self._declared_order if other in self._worker_context.roles])
            self._declared_order = ()
        self._order.start_turn(name)
        use.awake, why = self._with_siblings(name), f"needed by {role.label(spec.name)}"
        if (name, spec.name) not in self._known_sizes:  # A method's first run may create gradients and optimizer state.
            self._known_sizes.add((name, spec.name))
            self._evict_unneeded(name)
        for other in sorted(use.awake - {name}):
            self._ensure_awake(other, _ALL, why)
        self._ensure_awake(name, tags, why)

    def leave_call(self, seq: int) -> None:
        """Stop keeping roles awake for a call that has ended."""
        self._uses.pop(seq, None)

    def wake_for_use(self, name: str, tags: Sequence[str]) -> None:
        """Wake memory of a role until the current call ends. Without turns, only check that it is awake."""
        if not self.takes_turns:
            self._sleeper.check_sibling_awake(name, tags)
            return
        for use in list(self._uses.values()):
            use.awake |= {name}
        with self._worker_context.setting.with_base_settings():
            if self._sleeper.asleep.sleeping_tags(name):
                self._worker_context.device.invalidate_peak()
            call = running_call.get()
            work = None if call is None else self._worker_context.lane.running.get(call.seq)
            self._ensure_awake(name, tags, f"needed by {'another role' if work is None else work.label}")

    @contextlib.contextmanager
    def hold_awake(self, role: RoleInstance, why: str) -> Iterator[None]:
        """A context manager that keeps all memory of a role awake. The block may change the role's holdings.

        All ranks do the same. Without turns, sleeping memory sleeps again after the block, because a caller who has put
        several roles to sleep has no room for all roles at once.
        """
        name = role.name
        assert name is not None
        with self._holding(name):
            slept: RestorePlan | None = None
            if self.takes_turns:
                self._ensure_awake(name, _ALL, why)
            elif asleep := self._sleeper.asleep.sleeping_tags(name):
                slept = self._sleeper.asleep.plan_restore(name, asleep)
                self._sleeper.refuse_more(name, slept.on_device, True, True)
                self._sleeper.refuse_more(name, slept.anew, False, True)
                self._wake_role(name, asleep, why)
            try:
                yield
            except BaseException as error:
                try:
                    self._restore_sleep(name, slept)
                except Exception as second:
                    error.add_note(format_error(second))
                raise
            finally:
                self._accounts.mark_changed(name)
            self._restore_sleep(name, slept)

    def make_room(self, name: str) -> None:
        """Put other roles to sleep before a role is woken, as far as possible."""
        if self.takes_turns:
            with contextlib.suppress(MemoryBudgetError):  # The wake raises this error again, on all ranks.
                self._make_room(name, self._sleeper.wake_size(name, _ALL))

    def check_budget(self, role: str | None, what: str, more: Mapping[str, Any] | None = None) -> None:
        """Check the budgets after a call or constructor. Raise an error if other roles can't free enough memory."""
        if not self._accounts.budgets:
            return
        self._accounts.mark_changed(role)
        shares = self._accounts.compute_shares(more)
        if self.takes_turns:
            if role is not None:
                self._peaks[role] = max(self._peaks.get(role, 0), self._total_bytes(role, shares))
            shares = self._evict_others(shares, role, lambda shares: self._excess_bytes(shares, role), more)
        self._accounts.check_limits(role, what, shares)

    # -- internals

    @contextlib.contextmanager
    def _holding(self, name: str) -> Iterator[None]:
        """A context manager that keeps a role and all requested siblings awake."""
        self._uses[name] = _CallUse(frozenset({name}))
        try:
            yield
        finally:
            del self._uses[name]

    def _roles_in_use(self) -> frozenset[str]:
        return frozenset().union(*(use.awake for use in self._uses.values()))

    def _with_siblings(self, name: str) -> frozenset[str]:
        """Return a role, the siblings that it has requested, and the siblings that these have requested in turn."""
        members: set[str] = set()
        todo = [name]
        while todo:
            role = todo.pop()
            if role not in members and role in self._worker_context.roles:
                members.add(role)
                todo.extend(self._worker_context.roles[role].ctx._asked_siblings)
        return frozenset(members)

    def _ensure_awake(self, name: str, tags: Sequence[str], why: str) -> None:
        self._make_room(name, self._sleeper.wake_size(name, tags))
        if asleep := [tag for tag in self._sleeper.asleep.sleeping_tags(name) if tag in tags]:
            self._wake_role(name, asleep, why)

    def _evict_unneeded(self, name: str) -> None:
        with contextlib.suppress(MemoryBudgetError):  # If too little memory is free, a later check raises an error.
            self._evict_others(self._accounts.compute_shares(), name, lambda shares: 1)

    def _make_room(self, name: str, coming: int) -> None:
        """Put other roles to sleep until a role has room for `coming` bytes and for growth while running."""

        def excess(shares: Shares) -> int:
            return self._excess_bytes(shares, name) + coming + self._growth(name, shares)

        shares = self._evict_others(self._accounts.compute_shares(), name, excess)
        if not coming or self._excess_bytes(shares, name) + coming <= 0:
            return
        needed = coming + self._accounts.budgets.activations.get(name, 0)
        limit = self._tightest_limit(shares)
        if not self._accounts.has_outgrown(shares, name, limit, needed):
            action = f"waking role {name!r} needs {format_size(coming)}"
            if stay := sorted(self._roles_in_use() - {name}):
                action += f" beside {', '.join(stay)}, in use with it or asked for by ctx.sibling"
            raise self._accounts.budget_error(shares, limit, action, needed)

    def _evict_others(
        self,
        shares: Shares,
        name: str | None,
        excess: Callable[[Shares], int],
        more: Mapping[str, Any] | None = None,
    ) -> Shares:
        """Put other roles to sleep until `excess` returns 0 or no role is left, and return the new shares."""
        stay = self._roles_in_use() | ({name} if name is not None else set())
        tried: set[str] = set()
        anew = False
        room = "room for a function" if name is None else f"room for role {name!r}"
        while excess(shares) > 0:
            victim = self._choose_victim(shares, stay | tried)
            if victim is None:
                if not anew:
                    break
                tried, anew = set(), False  # Try all roles again: one may now be the last user of shared memory.
                continue
            tried.add(victim)
            before = self._sleeper.asleep.sleeping_tags(victim)
            self._put_to_sleep(victim, room, f"could not make {room}")
            anew |= self._sleeper.asleep.sleeping_tags(victim) != before
            shares = self._accounts.compute_shares(more)
        return shares

    def _choose_victim(self, shares: Shares, stay: frozenset[str]) -> str | None:
        """Return the role to put to sleep next, or None if no role can free memory.

        Memory that several roles hold counts for one of them and stays until its last holder sleeps. If no other role
        helps, a sleeping role may hold something new, or a part of another role's array.
        """
        candidates = [role for role in get_roles_by_name(self._worker_context) if role not in stay]
        partly = [role for role in candidates if len(self._sleeper.asleep.sleeping_tags(role)) < len(TAGS)]
        could_go = [role for role in partly if self._awake_bytes(role, shares) or shares.shared.get(role)]
        holders = [role for role in candidates if self._awake_bytes(role, shares)]
        victims = could_go or holders or [role for role in partly if not self._has_hooks(role)]
        return next(iter(self._order.sort_by_need(victims)), None)

    def _has_hooks(self, name: str) -> bool:
        """Return whether a role has a `sleep` or `wake` hook."""
        return any(self._worker_context.roles[name].find_hook(hook) is not None for hook in ("sleep", "wake"))

    def _awake_bytes(self, name: str, shares: Shares) -> int:
        device, residents = self._worker_context.boot.device, Purpose.RESIDENTS.word
        owned = shares.owned.get(name, {})
        return sum(size for (kind, where), size in owned.items() if where == device and kind != residents)

    def _total_bytes(self, name: str, shares: Shares) -> int:
        """Return the number of a role's bytes that a sleep could move or has already moved."""
        return self._awake_bytes(name, shares) + shares.asleep.get(name, 0)

    def _growth(self, name: str, shares: Shares) -> int:
        """Return by how many bytes a role was larger at its peak than now, for example because of gradients."""
        return max(0, self._peaks.get(name, 0) - self._total_bytes(name, shares))

    def _excess_bytes(self, shares: Shares, name: str | None) -> int:
        """Return by how many bytes memory exceeds the tightest limit while a role runs; negative if there is room."""
        activations = self._accounts.budgets.activations.get(name or "", 0)
        limit = self._tightest_limit(shares)
        return self._accounts.used_bytes(shares, limit) + activations - limit.nbytes

    def _tightest_limit(self, shares: Shares) -> Limit:
        """Return the limit with the least room. Shared limits also count the memory of other groups on the slot."""
        if len(self._limits) == 1:
            return self._limits[0]
        return min(self._limits, key=lambda each: each.nbytes - self._accounts.used_bytes(shares, each))

    def _wake_role(self, name: str, asleep: Sequence[str], why: str) -> None:
        start = time.time()
        try:
            nbytes = self._sleeper.wake_alone(self._worker_context.roles[name], asleep)
        except Exception as error:  # The role's `wake` hook may raise any error.
            kind = MemoryBudgetError if is_lack_of_room(error) else SleepingError
            why_not, trace = explain_error(error)
            raise kind(f"role {name!r} could not be woken: {why_not}", remote_traceback=trace) from error
        finally:
            self._accounts.on_moved(name)
        self._report_move(name, False, nbytes, start, False, why)

    def _restore_sleep(self, name: str, slept: RestorePlan | None) -> None:
        if slept is not None:
            self._put_to_sleep(name, "as before", "could not be put back to sleep", slept.tags, slept)

    def _put_to_sleep(
        self, name: str, why: str, failing: str, tags: Sequence[str] = _ALL, only: RestorePlan | None = None
    ) -> None:
        """Put a role to sleep on this rank, and report the move. `failing` is the text for an error."""
        start, before = time.time(), self._sleeper.asleep.sleeping_tags(name)
        try:
            nbytes = self._sleeper.sleep_alone(name, tags, only)
        except Consequence:  # Another rank has failed.
            raise
        except Exception as error:  # The sleeping role's hook may raise any error.
            why_not, trace = explain_error(error)
            raise MemoryBudgetError(f"role {name!r} {failing}: {why_not}", remote_traceback=trace) from error
        finally:
            self._accounts.on_moved(name)
        if nbytes or self._sleeper.asleep.sleeping_tags(name) != before:
            whole, awake = len(tags) == len(TAGS), self._sleeper.asleep.awake_bytes(name, tags)
            self._report_move(name, True, nbytes, start, whole, why, awake)

    def _report_move(
        self,
        name: str,
        asleep: bool,
        nbytes: int,
        start: float,
        whole: bool,
        why: str,
        kept: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        in_call = any(use.is_call for use in self._uses.values())
        movement = name, asleep, nbytes, start, time.time(), whole, why, in_call, dict(kept)
        self._worker_context.send_message(MemoryMoved(*movement))

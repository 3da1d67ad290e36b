"""Roles of a worker that take turns within its budget (`residency="swap"`).

Each worker decides for itself, on the lane: where a role's memory is makes no difference to what it computes, so ranks
needn't agree. Before a call, who isn't needed makes room, and the role is woken; after it, where it has come to hold
more, others make room again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from colocate._protocol import from_worker
from colocate._protocol.consequence import Consequence
from colocate._protocol.ledger import TAGS, Purpose
from colocate._role import torch_works
from colocate._role.budget import Limit
from colocate._role.method_spec import MethodSpec
from colocate._system.jobs import error_text
from colocate._system.sizes import size_text
from colocate.errors import ColocateError, MemoryBudgetError
from colocate.worker.accounts import Accounts
from colocate.worker.hosted import HostedRole
from colocate.worker.ledger import Shares
from colocate.worker.memory_site import Worker
from colocate.worker.moves import Coming
from colocate.worker.prefetch import Prefetch
from colocate.worker.sleeping import Sleeper
from colocate.worker.swapping import Order, Room, State, Use, by_last_use, who_goes


class Residency:
    """Has the roles of a worker be awake when they are called, and keeps all of them within the budget."""

    def __init__(self, site: Worker, sleeper: Sleeper, accounts: Accounts) -> None:
        self._site = site
        self._sleeper = sleeper
        self._accounts = accounts
        self._order: Order | None = None
        self._declared: Sequence[str] = ()
        self._limit: Limit | None = None
        self._needed: dict[object, frozenset[str]] = {}  # by what runs: who is to stay awake
        self._peaks: dict[str, int] = {}  # what roles have had at most
        self._written: dict[str, int] = {}  # how often their tensors had been, when that was last looked at
        self._copied: set[str] = set()  # whose copies are up to date
        self._known: set[tuple[str, str]] = set()  # the methods that have run, by role
        self._wanted: dict[str, Sequence[str]] = {}  # what of roles their turns have begun with
        self._prefetch = Prefetch(site, sleeper)

    def begin(self) -> None:
        """The budgets are known."""
        budgets = self._accounts.budgets
        if budgets.swap:
            self._order = Order()
            self._declared = budgets.step
            self._limit = min((each for each in budgets.limits if each.role is None and each.device), key=_nbytes)

    # -- around calls

    @contextlib.contextmanager
    def constructing(self, name: str) -> Iterator[None]:
        """A block in which a role is constructed: how much it comes to hold nobody knows, so all others make room."""
        with self.holding(name):
            if self._order is not None:
                self._clear(name)
            yield

    def enter(self, seq: int, role: HostedRole, spec: MethodSpec) -> None:
        """A method is about to run: what it needs is awake afterwards.

        Raises:
            MemoryBudgetError: There is no room for it.
        """
        if self._order is None:
            return
        self._needed[seq] = frozenset()  # it may ask for siblings
        if role.name is None or spec.awake == ():
            return
        if self._declared:  # roles that live on other slots have no turn here
            self._order = Order([name for name in self._declared if name in self._site.roles])
            self._declared = ()
        tags = tuple(TAGS) if spec.awake is None else spec.awake
        if begins := self._order.begins(role.name):
            self._wanted[role.name] = tags
        if begins or self._on_gpu:
            self.settle()
        needed = frozenset(self._with_siblings(role.name))
        self._needed[seq] = needed
        if (role.name, spec.name) not in self._known:  # it may leave gradients, and an optimizer's state
            self._known.add((role.name, spec.name))
            self._clear(role.name)
        for name in sorted(needed - {role.name}):
            self._awaken(name, tuple(TAGS))
        self._awaken(role.name, tags)
        self._look_ahead(role.name)

    def leave(self, seq: int) -> None:
        """A call has ended."""
        self._needed.pop(seq, None)

    def reach(self, name: str) -> None:
        """A role's object is wanted, in whatever runs.

        Raises:
            SleepingError: Memory of it sleeps.
            MemoryBudgetError: It does, and there is no room for it.
        """
        if self._order is None:
            self._sleeper.refuse(name)
            return
        for seq, needed in list(self._needed.items()):
            self._needed[seq] = needed | {name}
        with self._site.setting.amid():
            if name in self._prefetch.moving:
                self.settle()
            if self._sleeper.asleep.tags(name):
                self._site.device.forget()
            self._awaken(name, tuple(TAGS))

    @property
    def is_moving(self) -> bool:
        """Whether memory moves beside what runs, or has."""
        return self._prefetch.is_under_way

    def settle(self) -> None:
        """What is moved ahead of time is where it is to be from now on."""
        if self._prefetch.is_under_way:
            moved = self._prefetch.moving
            self._copied -= self._prefetch.settle()
            for name in moved:
                self._accounts.changed(name)

    def close(self) -> None:
        """The worker ends."""
        self._prefetch.close()

    @contextlib.contextmanager
    def holding(self, name: str) -> Iterator[None]:
        """A block in which a role is used: it stays awake, and so do the siblings that it asks for."""
        self._needed[name] = frozenset({name})
        try:
            yield
        finally:
            del self._needed[name]

    @contextlib.contextmanager
    def awake(self, role: HostedRole) -> Iterator[None]:
        """A block in which all of a role is awake, on this rank as on all others; what it holds may change there.

        Where roles don't take turns, what slept sleeps again behind it: whoever has put several to sleep has no room
        for all of them at once.

        Raises:
            MemoryBudgetError: There is no room for it, or where it is to sleep again.
        """
        assert role.name is not None
        self.settle()
        with self.holding(role.name):
            if self._order is not None:
                self._awaken(role.name, tuple(TAGS))
                slept: Coming | None = None
            else:
                slept = self._wake_for_once(role.name)
            try:
                yield
            except BaseException as error:
                try:
                    self._sleep_again(role.name, slept)
                except Exception as second:
                    error.add_note(error_text(second))
                raise
            finally:
                self._accounts.changed(role.name)
            self._sleep_again(role.name, slept)

    def make_room(self, name: str) -> None:
        """A role is about to be woken: have others make room, as far as they can."""
        self.settle()
        if self._order is not None:
            with contextlib.suppress(MemoryBudgetError):  # the wake finds that, too, and tells all ranks of it
                self._make_room(name, self._sleeper.size(name, tuple(TAGS)))

    def check(self, role: str | None, what: str, more: Mapping[str, Any] | None = None) -> None:
        """A role has run, or been constructed: raise when all have more than they may, and nobody can make room.

        Args:
            role: The role; None for a function.
            what: What it has run.
            more: Values that are about to be kept, by the method that has made them.

        Raises:
            MemoryBudgetError: They have.
            RoleError: What one of them has can't be looked at.
        """
        if not self._accounts.budgets:
            return
        if self._on_gpu:
            self.settle()
        shares = self._accounts.look(role, more)
        if self._order is not None:
            shares = self._settled(role, shares, more)
        self._accounts.judge(role, what, shares)

    # -- how

    @property
    def _on_gpu(self) -> bool:
        """Whether what memory is used for shows when it has moved only. The host's is where it was."""
        return self._site.boot.device != "cpu"

    def _settled(self, name: str | None, shares: Shares, more: Mapping[str, Any] | None) -> Shares:
        """When too much is awake, have who isn't needed make room; what all have then."""
        if name is not None:
            self._note(name, shares)
        needed = frozenset().union(*self._needed.values()) | ({name} if name is not None else set())
        return self._have_others_go(shares, name, needed, 0, lambda shares: self._over(shares, name), more)

    def _have_others_go(
        self,
        shares: Shares,
        name: str | None,
        stay: frozenset[str],
        coming: int,
        excess: Callable[[Shares], int],
        more: Mapping[str, Any] | None = None,
    ) -> Shares:
        """Have others make room for a role, as far as they can; what all have then.

        Args:
            shares: What all have.
            name: The role; None for a function.
            stay: Who can't go.
            coming: What comes to the role.
            excess: The bytes that are too many.
            more: Values that are about to be kept.
        """
        tried: set[str] = set()
        anew = False
        while excess(shares) > 0:
            goers = self._goers(shares, name, stay | tried, coming)
            if not goers:
                if not anew:
                    break
                tried, anew = set(), False  # who could not go may have it to itself now
                continue
            for each in goers:
                tried.add(each)
                before = self._sleeper.asleep.tags(each)
                self._put_to_sleep(each, f"could not make room for {name or 'a function'}")
                anew |= self._sleeper.asleep.tags(each) != before
            shares = self._accounts.shares(more)
        return shares

    def _with_siblings(self, name: str) -> set[str]:
        """A role, and the roles of its worker that it has asked for, and may have kept."""
        found: set[str] = set()
        todo = [name]
        while todo:
            each = todo.pop()
            if each not in found and each in self._site.roles:
                found.add(each)
                todo.extend(self._site.roles[each].ctx._asked)
        return found

    def _clear(self, name: str) -> None:
        """Have all others of whom nothing is needed make room, as far as they can."""
        self.settle()
        stay = frozenset().union({name}, *self._needed.values())
        with contextlib.suppress(MemoryBudgetError):  # it may not be needed; when it is, that is told
            self._have_others_go(self._accounts.shares(), name, stay, 0, lambda shares: 1)

    def _awaken(self, name: str, tags: Sequence[str]) -> None:
        asleep = [tag for tag in self._sleeper.asleep.tags(name) if tag in tags]
        if asleep:
            self.settle()
        self._make_room(name, self._sleeper.size(name, tags))
        if asleep:
            self._wake(name, asleep, self._writes(name))

    def _wake(self, name: str, asleep: Sequence[str], writes: bool) -> None:
        start = time.time()
        try:
            nbytes = self._sleeper.wake_alone(self._site.roles[name], asleep, writes)
        except Exception as error:  # of its own hook, too
            raise MemoryBudgetError(f"role {name!r} could not be woken: {error_text(error)}") from error
        finally:
            self._accounts.changed(name)
        self._site.say(from_worker.Moved(name, False, nbytes, start, time.time(), False))

    def _wake_for_once(self, name: str) -> Coming | None:
        """Have all of a role be awake, if its budget has room for that. What has come, if anything slept."""
        asleep = self._sleeper.asleep.tags(name)
        if not asleep:
            return None
        coming = self._sleeper.asleep.coming(name, asleep)
        self._sleeper.refuse_more(name, coming.on_device, True, True)
        self._sleeper.refuse_more(name, coming.anew, False, True)
        self._wake(name, asleep, False)
        return coming

    def _sleep_again(self, name: str, slept: Coming | None) -> None:
        if slept is not None:
            self._put_to_sleep(name, "could not be put back to sleep", slept.tags, slept.pieces)

    def _writes(self, name: str) -> bool:
        """Whether a role that is about to run will be written into, as far as anybody knows."""
        assert self._order is not None
        ahead = self._order.ahead()
        return ahead is None or ahead[0].role != name or ahead[0].writes

    def _make_room(self, name: str, coming: int) -> None:
        """Have so many bytes be free, and what the role needs while it runs."""
        assert self._limit is not None
        shares = self._accounts.shares()
        pinned = frozenset().union({name}, *self._needed.values())
        shares = self._have_others_go(
            shares,
            name,
            pinned,
            coming,
            lambda shares: self._over(shares, name) + coming + self._growth(name, shares),
        )
        if not coming or self._over(shares, name) + coming <= 0:
            return
        needed = coming + self._accounts.budgets.activations.get(name, 0)
        if not self._accounts.has_outgrown(shares, name, self._limit, needed):
            raise self._accounts.exceeded(shares, self._limit, f"waking role {name!r} needs {size_text(coming)}")

    def _over(self, shares: Shares, name: str | None) -> int:
        """The bytes that are too many, while a role runs."""
        assert self._limit is not None
        activations = self._accounts.budgets.activations.get(name or "", 0)
        return self._accounts.used(shares, self._limit) + activations - self._limit.nbytes

    def _growth(self, name: str, shares: Shares) -> int:
        """What a role has had besides what it has: gradients, say, that it has let go of."""
        return max(0, self._peaks.get(name, 0) - self._size(name, shares))

    def _look_ahead(self, name: str) -> None:
        """While a role runs, have the next one come, where there is room for both and nothing more is copied so."""
        assert self._order is not None
        ahead, runs = self._order.ahead(), self._site.roles[name]
        if self._prefetch.is_under_way or ahead is None or len(ahead) < 2 or ahead[0].role != name:
            return
        # What it lets go of meanwhile torch gives to others who compute on the usual stream, as what has come to it was
        # made there: they wait for that stream, and not for its own.
        if runs.setting.is_aside(runs.settings) or torch_works.pending():
            return
        follows = ahead[1].role
        wanted = self._wanted.get(follows, ())
        asleep = [tag for tag in self._sleeper.asleep.tags(follows) if tag in wanted]
        if not asleep:
            return
        coming, shares = self._sleeper.asleep.coming(follows, asleep), self._accounts.shares()
        goers = self._choice(
            shares, follows, frozenset({follows}), coming.on_device, [*ahead[1:], ahead[0]], ahead[0].writes
        )
        running = frozenset().union(*self._needed.values())
        if goers is None or goers & running or not all(self._moves_ahead(each) for each in {follows, *goers}):
            return
        less = sum(self._awake(each, shares) for each in goers)
        if self._over(shares, name) - less + coming.on_device + self._growth(name, shares) > 0:
            return
        try:
            going = {each: self._sleeper.going(each, tuple(TAGS)) for each in goers}
        except ColocateError:  # its turn will tell it
            return
        self._prefetch.begin(going, follows, coming, ahead[1].writes)
        self._copied |= goers
        for each in {follows, *goers}:
            self._accounts.changed(each)

    def _moves_ahead(self, name: str) -> bool:
        """Whether a role's memory may go and come while another one runs: no code of it has to.

        What keeps its addresses goes when the device has done all that it had to, for which must not be waited while
        somebody captures a graph.
        """
        return not self._site.roles[name].keeps_addresses and not self._is_told(name)

    def _goers(self, shares: Shares, name: str | None, stay: frozenset[str], coming: int = 0) -> Iterable[str]:
        """Who is to make room next, so that a role can run; all who can where nothing else helps.

        Who sleeps may have come to hold something since, or have it to itself only now: nobody else helps any more. Nor
        does it count who has what another one has, too, where that begins elsewhere (a part of an array).
        """
        assert self._order is not None
        ahead = self._order.ahead()
        goers = self._choice(shares, name or "", stay, coming, ahead)
        if goers is None:
            goers = frozenset(self._candidates(shares, stay))
        others = [each for each in self._names() if each not in stay]
        holders = {each for each in others if self._awake(each, shares)}
        return goers or holders or {each for each in others if self._may_go(each)}

    def _may_go(self, name: str) -> bool:
        """Whether a role may be put to sleep of which nothing counts: not where it would be told of it."""
        return len(self._sleeper.asleep.tags(name)) < len(TAGS) and not self._is_told(name)

    def _is_told(self, name: str) -> bool:
        """Whether a role has means of its own to sleep or to wake, which are its code."""
        return any(self._site.roles[name].hook(each) is not None for each in ("sleep", "wake"))

    def _candidates(self, shares: Shares, stay: frozenset[str]) -> set[str]:
        """Who can make room.

        What several hold counts with one of them, and stays as long as another one is awake.
        """
        return {
            each
            for each in self._names()
            if each not in stay
            and (self._awake(each, shares) or shares.shared.get(each))
            and len(self._sleeper.asleep.tags(each)) < len(TAGS)
        }

    def _names(self) -> list[str]:
        return [each.name for each in list(self._site.roles.values()) if each.name is not None]

    def _choice(
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
        assert self._order is not None
        assert self._limit is not None
        roles = self._names()
        awake = {each: self._awake(each, shares) for each in roles}
        candidates = self._candidates(shares, stay)
        if not candidates:
            return frozenset()
        moving = candidates | {runs}
        sizes = {each: awake[each] or self._size(each, shares) for each in roles}
        sizes[runs] = awake.get(runs, 0) + coming
        fixed = self._accounts.used(shares, self._limit) - sum(awake.get(each, 0) for each in moving)
        needs = dict(self._accounts.budgets.activations)
        if runs:
            needs[runs] = needs.get(runs, 0) + self._growth(runs, shares)
        room = Room(self._limit.nbytes - fixed, sizes, needs)
        dirty = moving - self._copied
        if writes and ahead is not None:
            dirty |= {ahead[-1].role} & moving
        state = State(frozenset(moving), frozenset(dirty))
        if ahead is not None and ahead[0].role == runs:
            return who_goes([use for use in ahead if use.role in moving or use.role not in stay], room, state)
        return by_last_use(self._order.recent, runs, room, state)

    def _put_to_sleep(
        self, name: str, failing: str, tags: Sequence[str] = tuple(TAGS), only: Collection[int] | None = None
    ) -> None:
        """See `Sleeper.sleep_alone`. `failing`: what is wrong with the role if it can't."""
        self.settle()
        start, before = time.time(), self._sleeper.asleep.tags(name)
        try:
            nbytes = self._sleeper.sleep_alone(name, tags, only)
        except Consequence:  # of a peer's failure
            raise
        except Exception as error:  # of its own hook, too: the role that is about to run isn't to blame
            raise MemoryBudgetError(f"role {name!r} {failing}: {error_text(error)}") from error
        finally:
            self._accounts.changed(name)
        self._copied.add(name)
        if nbytes or self._sleeper.asleep.tags(name) != before:
            whole, kept = len(tags) == len(TAGS), self._sleeper.asleep.kept_awake(name)
            self._site.say(from_worker.Moved(name, True, nbytes, start, time.time(), whole, kept_awake=kept))

    def _note(self, name: str, shares: Shares) -> None:
        """What a role has come to hold, and whether it was written into."""
        assert self._order is not None
        self._peaks[name] = max(self._peaks.get(name, 0), self._size(name, shares))
        written = self._accounts.written(name)
        if self._written.get(name) != written:
            self._written[name] = written
            self._copied.discard(name)
            self._order.wrote(name)

    def _awake(self, name: str, shares: Shares) -> int:
        """The bytes of a role that could go."""
        here = self._site.boot.device
        owned = shares.owned.get(name, {})
        return sum(size for (kind, where), size in owned.items() if where == here and kind != _RESIDENTS)

    def _size(self, name: str, shares: Shares) -> int:
        return self._awake(name, shares) + shares.asleep.get(name, 0)


_RESIDENTS = Purpose.RESIDENTS.word


def _nbytes(limit: Limit) -> int:
    return limit.nbytes

"""Roles of a worker that take turns within its budget (`residency="swap"`).

Each worker decides for itself, on the lane: where a role's memory is makes no difference to what it computes, so ranks
needn't agree. Before a call, who isn't needed makes room, and the role is woken; after it, where it has come to hold
more, others make room again.

The next role's memory comes while the present one computes (`Prefetch`): what moves is found and noted on the lane, and
a thread does the copying. Whoever needs to know that it is done waits for it (`settle`). What can't be done so is as it
was, and is done, or fails, when its turn comes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate._devices.cuda_driver import beside_captures
from colocate._protocol import from_worker
from colocate._protocol.consequence import Consequence
from colocate._protocol.ledger import TAGS
from colocate._role import torch_works
from colocate._role.context import running_call
from colocate._role.method_spec import MethodSpec
from colocate._system.jobs import JobThread, error_text, report_exception
from colocate._system.numbers import size_text
from colocate.errors import ColocateError, MemoryBudgetError, SleepingError
from colocate.worker.memory.accounts import Accounts
from colocate.worker.memory.asleep import Coming, Going
from colocate.worker.memory.ledger import Shares
from colocate.worker.memory.site import Worker
from colocate.worker.memory.sleeping import Sleeper, lacks_room, reason
from colocate.worker.memory.turns import Turns
from colocate.worker.serving.hosted import HostedRole

_TOLD_BY_THEMSELVES = ("sleep", "wake")
"""Functions that tell what has moved, and are no calls of anybody's."""


@attrs.define
class _Use:
    """What runs, and whom it uses.

    Attributes:
        awake: The roles that are to stay awake.
        reach: Those that it may use, also such as need nothing awake; nobody, of functions and of what is no call.
        is_call: Whether it is somebody's call.
    """

    awake: frozenset[str] = frozenset()
    reach: frozenset[str] = frozenset()
    is_call: bool = False


class Residency:
    """Has the roles of a worker be awake when they are called, and keeps all of them within the budget."""

    def __init__(self, site: Worker, sleeper: Sleeper, accounts: Accounts) -> None:
        self._site = site
        self._sleeper = sleeper
        self._accounts = accounts
        self._turns: Turns | None = None
        self._uses: dict[object, _Use] = {}  # calls by their numbers, other uses of a role by its name
        self._known: set[tuple[str, str]] = set()  # the methods that have run, by role
        self._wanted: dict[str, Sequence[str]] = {}  # what of roles their turns have begun with
        self._prefetch = Prefetch(site, sleeper)

    def begin(self) -> None:
        """The budgets are known."""
        if self._accounts.budgets.swap:
            self._turns = Turns(self._site, self._sleeper, self._accounts)

    # -- around calls

    @contextlib.contextmanager
    def constructing(self, name: str) -> Iterator[None]:
        """A block in which a role is constructed: how much it comes to hold nobody knows, so all others make room."""
        with self.holding(name):
            if self._turns is not None:
                self._clear(name)
            yield

    def enter(self, seq: int, role: HostedRole, spec: MethodSpec) -> None:
        """A method is about to run: what it needs is awake afterwards.

        Raises:
            MemoryBudgetError: There is no room for it.
            SleepingError: Its own `wake()` has raised.
        """
        if self._turns is None:
            return
        use = self._uses[seq] = _Use()
        if role.name is None:
            use.is_call = spec.name not in _TOLD_BY_THEMSELVES
            return
        use.reach, use.is_call = frozenset(self._with_siblings(role.name)), True
        # Also where it needs nothing awake: it may write there, or let go of it.
        if use.reach & self._prefetch.moving:
            self.settle()
        if spec.awake == ():
            return
        tags = tuple(TAGS) if spec.awake is None else spec.awake
        if self._turns.begins(role.name):
            self._wanted[role.name] = tags
        self.settle()
        use.awake, why = use.reach, f"needed by {role.label(spec.name)}"
        if (role.name, spec.name) not in self._known:  # it may leave gradients, and an optimizer's state
            self._known.add((role.name, spec.name))
            self._clear(role.name)
        for name in sorted(use.awake - {role.name}):
            self._awaken(name, tuple(TAGS), why)
        self._awaken(role.name, tags, why)
        self._look_ahead(role.name)

    def leave(self, seq: int) -> None:
        """A call has ended."""
        self._uses.pop(seq, None)

    def reach(self, name: str) -> None:
        """A role's object is wanted, in whatever runs.

        Raises:
            SleepingError: Memory of it sleeps, or its own `wake()` has raised.
            MemoryBudgetError: It does, and there is no room for it.
        """
        if self._turns is None:
            self._sleeper.refuse(name)
            return
        for use in list(self._uses.values()):
            use.awake |= {name}
        with self._site.setting.amid():
            if name in self._prefetch.moving:
                self.settle()
            if self._sleeper.asleep.tags(name):
                self._site.device.forget()
            call = running_call.get()
            work = None if call is None else self._site.lane.running.get(call.seq)
            self._awaken(name, tuple(TAGS), f"needed by {'another role' if work is None else work.label}")

    @property
    def takes_turns(self) -> bool:
        """Whether roles do."""
        return self._turns is not None

    @property
    def is_moving(self) -> bool:
        """Whether memory moves beside what runs, or has."""
        return self._prefetch.is_under_way

    def settle(self) -> None:
        """What is moved ahead of time is where it is to be from now on."""
        if self._prefetch.is_under_way:
            moved = self._prefetch.moving
            self._prefetch.settle()
            for name in moved:
                self._accounts.moved(name)

    def close(self) -> None:
        """The worker ends."""
        self._prefetch.close()

    @contextlib.contextmanager
    def holding(self, name: str) -> Iterator[None]:
        """A block in which a role is used: it stays awake, and so do the siblings that it asks for."""
        self._uses[name] = _Use(frozenset({name}))
        try:
            yield
        finally:
            del self._uses[name]

    @contextlib.contextmanager
    def awake(self, role: HostedRole, why: str) -> Iterator[None]:
        """A block in which all of a role is awake, on this rank as on all others; what it holds may change there.

        Where roles don't take turns, what slept sleeps again behind it: whoever has put several to sleep has no room
        for all of them at once.

        Args:
            role: The role.
            why: What for.

        Raises:
            MemoryBudgetError: There is no room for it, or where it is to sleep again.
            SleepingError: Its own `wake()` has raised.
        """
        assert role.name is not None
        self.settle()
        with self.holding(role.name):
            if self._turns is not None:
                self._awaken(role.name, tuple(TAGS), why)
                slept: Coming | None = None
            else:
                slept = self._wake_for_once(role.name, why)
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
        if self._turns is not None:
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
        self.settle()
        shares = self._accounts.look(role, more)
        if self._turns is not None:
            shares = self._settled(role, shares, more)
        self._accounts.judge(role, what, shares)

    # -- how

    @property
    def _is_in_call(self) -> bool:
        return any(use.is_call for use in self._uses.values())

    def _in_use(self) -> frozenset[str]:
        """The roles that are to stay awake."""
        return frozenset().union(*(use.awake for use in self._uses.values()))

    def _settled(self, name: str | None, shares: Shares, more: Mapping[str, Any] | None) -> Shares:
        """When too much is awake, have who isn't needed make room; what all have then."""
        turns = self._turns
        assert turns is not None
        if name is not None:
            turns.note(name, shares)
        stay = self._in_use() | ({name} if name is not None else set())
        return self._have_others_go(shares, name, stay, 0, lambda shares: turns.over(shares, name), more)

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
        assert self._turns is not None
        tried: set[str] = set()
        anew = False
        while excess(shares) > 0:
            goers = self._turns.goers(shares, name, stay | tried, coming)
            if not goers:
                if not anew:
                    break
                tried, anew = set(), False  # who could not go may have it to itself now
                continue
            for each in goers:
                tried.add(each)
                before = self._sleeper.asleep.tags(each)
                room = "room for a function" if name is None else f"room for role {name!r}"
                self._put_to_sleep(each, room, f"could not make {room}")
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
        stay = self._in_use() | {name}
        with contextlib.suppress(MemoryBudgetError):  # it may not be needed; when it is, that is told
            self._have_others_go(self._accounts.shares(), name, stay, 0, lambda shares: 1)

    def _awaken(self, name: str, tags: Sequence[str], why: str) -> None:
        assert self._turns is not None
        asleep = [tag for tag in self._sleeper.asleep.tags(name) if tag in tags]
        if asleep:
            self.settle()
        self._make_room(name, self._sleeper.size(name, tags))
        if asleep:
            self._wake(name, asleep, why)

    def _wake(self, name: str, asleep: Sequence[str], why: str) -> None:
        start = time.time()
        try:
            nbytes = self._sleeper.wake_alone(self._site.roles[name], asleep)
        except Exception as error:  # of its own hook, too
            kind = MemoryBudgetError if lacks_room(error) else SleepingError
            why_not, trace = reason(error)
            raise kind(f"role {name!r} could not be woken: {why_not}", remote_traceback=trace) from error
        finally:
            self._accounts.moved(name)
        told = name, False, nbytes, start, time.time(), False, why
        self._site.say(from_worker.Moved(*told, in_call=self._is_in_call))

    def _wake_for_once(self, name: str, why: str) -> Coming | None:
        """Have all of a role be awake, if its budget has room for that. What has come, if anything slept."""
        asleep = self._sleeper.asleep.tags(name)
        if not asleep:
            return None
        coming = self._sleeper.asleep.coming(name, asleep)
        self._sleeper.refuse_more(name, coming.on_device, True, True)
        self._sleeper.refuse_more(name, coming.anew, False, True)
        self._wake(name, asleep, why)
        return coming

    def _sleep_again(self, name: str, slept: Coming | None) -> None:
        if slept is not None:
            self._put_to_sleep(name, "as before", "could not be put back to sleep", slept.tags, slept)

    def _make_room(self, name: str, coming: int) -> None:
        """Have so many bytes be free, and what the role needs while it runs."""
        turns = self._turns
        assert turns is not None
        shares = self._accounts.shares()
        shares = self._have_others_go(
            shares,
            name,
            self._in_use() | {name},
            coming,
            lambda shares: turns.over(shares, name) + coming + turns.growth(name, shares),
        )
        if not coming or turns.over(shares, name) + coming <= 0:
            return
        needed = coming + self._accounts.budgets.activations.get(name, 0)
        if not self._accounts.has_outgrown(shares, name, turns.limit, needed):
            what = f"waking role {name!r} needs {size_text(coming)}"
            if stay := sorted(self._in_use() - {name}):
                what += f" beside {', '.join(stay)}, in use with it or asked for by ctx.sibling"
            raise self._accounts.exceeded(shares, turns.limit, what, needed)

    def _look_ahead(self, name: str) -> None:
        """While a role runs, have the next one come, where there is room for both and nothing more is copied so."""
        turns = self._turns
        assert turns is not None
        ahead, runs = turns.order.ahead(), self._site.roles[name]
        if self._prefetch.is_under_way or ahead is None or len(ahead) < 2 or ahead[0] != name:
            return
        # What a role has left there may write into its memory whenever something is awaited.
        if (tasks := self._site.lane.tasks) is not None and tasks.has_others():
            return
        # What it lets go of meanwhile torch gives to others who compute on the usual stream, as what has come to it was
        # made there: they wait for that stream, and not for its own.
        if runs.setting.is_aside(runs.settings) or torch_works.pending():
            return
        follows = ahead[1]
        wanted = self._wanted.get(follows, ())
        asleep = [tag for tag in self._sleeper.asleep.tags(follows) if tag in wanted]
        if not asleep:
            return
        coming, shares = self._sleeper.asleep.coming(follows, asleep), self._accounts.shares()
        goers = turns.choice(shares, follows, frozenset({follows}), coming.on_device, [*ahead[1:], ahead[0]])
        if goers is None or not all(turns.moves_ahead(each) for each in {follows, *goers}):
            return
        if {follows, *goers} & self._in_use().union(*(use.reach for use in self._uses.values())):
            return
        less = sum(turns.awake(each, shares) for each in goers)
        if turns.over(shares, name) - less + coming.on_device + turns.growth(name, shares) > 0:
            return
        try:
            going = {each: self._sleeper.going(each, tuple(TAGS)) for each in goers}
        except ColocateError:  # its turn will tell it
            return
        if not self._prefetch.can_begin():
            return
        self._prefetch.begin(going, follows, coming)
        for each in {follows, *goers}:
            self._accounts.changed(each)

    def _put_to_sleep(
        self, name: str, why: str, failing: str, tags: Sequence[str] = tuple(TAGS), only: Coming | None = None
    ) -> None:
        """See `Sleeper.sleep_alone`. `why`: what for; `failing`: what is wrong with the role if it can't."""
        self.settle()
        start, before = time.time(), self._sleeper.asleep.tags(name)
        try:
            nbytes = self._sleeper.sleep_alone(name, tags, only)
        except Consequence:  # of a peer's failure
            raise
        except Exception as error:  # of its own hook, too: the role that is about to run isn't to blame
            why_not, trace = reason(error)
            raise MemoryBudgetError(f"role {name!r} {failing}: {why_not}", remote_traceback=trace) from error
        finally:
            self._accounts.moved(name)
        if nbytes or self._sleeper.asleep.tags(name) != before:
            whole, kept = len(tags) == len(TAGS), self._sleeper.asleep.kept_awake(name, tags)
            told = name, True, nbytes, start, time.time(), whole, why
            self._site.say(from_worker.Moved(*told, in_call=self._is_in_call, kept_awake=kept))


@attrs.define(eq=False)
class _Moves:
    """What is under way.

    Attributes:
        going: By role.
        name: Whose memory comes.
        coming: That.
        gone: Of those, the roles whose memory has gone.
        has_come: Whether it has.
        is_over: Whether nothing more is done.
    """

    going: Mapping[str, Going]
    name: str
    coming: Coming
    gone: set[str] = attrs.field(factory=set)
    has_come: bool = False
    is_over: threading.Event = attrs.field(factory=threading.Event)


class Prefetch:
    """Moves memory of a worker's roles beside the lane."""

    def __init__(self, site: Worker, sleeper: Sleeper) -> None:
        self._site = site
        self._sleeper = sleeper
        self._thread = JobThread(f"colocate-prefetch-{site.boot.worker}", lambda error: report_exception())
        self._moves: _Moves | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether something moves, or has and isn't settled yet."""
        return self._moves is not None

    @property
    def moving(self) -> set[str]:
        """The roles of which memory moves."""
        return set() if self._moves is None else {self._moves.name, *self._moves.going}

    def can_begin(self) -> bool:
        """Whether there is a thread for it. Where none can be started, memory moves when its turn comes."""
        try:
            self._thread.start()
        except RuntimeError:
            return False
        return True

    def begin(self, going: Mapping[str, Going], name: str, coming: Coming) -> None:
        """Begin to move memory, which `can_begin`: it counts as moved from now on.

        Args:
            going: What goes first, by role.
            name: Whose comes then.
            coming: What comes.
        """
        for each, its in going.items():
            self._sleeper.asleep.add(each, its)
        self._sleeper.asleep.remove(name, coming)
        moves = self._moves = _Moves(going, name, coming)
        self._thread.soon(partial(self._move, moves))

    def settle(self) -> set[str]:
        """Wait until it is done, on the lane: all is then where it is noted to be.

        Returns:
            The roles whose memory was to go and hasn't.
        """
        moves = self._moves
        if moves is None:
            return set()
        moves.is_over.wait()
        self._moves = None
        stayed = moves.going.keys() - moves.gone
        for each in stayed:
            self._sleeper.asleep.remove(each, moves.going[each])
        if moves.has_come:
            self._sleeper.has_come(moves.coming)
        else:
            self._sleeper.asleep.add(moves.name, moves.coming)
        return stayed

    def close(self) -> None:
        """The worker ends."""
        if self._moves is not None:
            self._moves.is_over.wait()
        self._thread.close()

    # -- on the thread

    def _move(self, moves: _Moves) -> None:
        room, turn = f"room for role {moves.name!r}", "its turn is next"
        try:
            with beside_captures(self._site.boot.device):
                for name, going in moves.going.items():
                    start = time.time()
                    written = self._sleeper.offload.write(going.storages, going.emptied)
                    written.put_away(gives_back=False)
                    moves.gone.add(name)
                    told = name, True, going.size, start, time.time(), True, room, True, False
                    self._site.say(from_worker.Moved(*told, self._sleeper.asleep.kept_awake(name)))
                start = time.time()
                self._sleeper.offload.bring_back(moves.coming.pieces)
                moves.has_come = True
                size = moves.coming.size
                self._site.say(from_worker.Moved(moves.name, False, size, start, time.time(), False, turn, True))
        except (OSError, MemoryError, ValueError):
            pass  # there is no room, or it can't be read: whoever needs it finds that, and tells it
        finally:
            moves.is_over.set()

"""Who of a worker's roles has how much memory, each byte once, and whether that is more than they may have."""

from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate._devices.cuda_driver import beside_captures
from colocate._protocol.ledger import Purpose
from colocate._role.budget import NO_BUDGETS, Budgets, Limit
from colocate._system.numbers import size_text
from colocate._system.room import private_bytes
from colocate.errors import MemoryBudgetError, RoleError
from colocate.features.memory.messages import Holds, Ledger, Sizes
from colocate.features.memory.sleep import Sleeper
from colocate.features.memory.vmm import absent
from colocate.gpus import in_use
from colocate.worker.context import WorkerContext, beside, named
from colocate.worker.holdings import Holdings, Storages, gradients_of, held_by, lie_in, search
from colocate.worker.hooks import OfWorker
from colocate.worker.serving.failure import LOOKING
from colocate.worker.serving.role_instance import RoleInstance

# So long a look waits for the lane, where a call may take longer. Whoever looks wants to know within a second.
_WITHIN_S = 0.2
_CHILDREN = "children"


class LookError(Exception):
    """What a role holds can't be looked at: its `device_state()` has raised, or code of a tensor of its own kind.

    So may looking at what the role changes just then. The role's name, and the traceback.
    """

    def __init__(self, role: str, trace: str) -> None:
        super().__init__(role, trace)
        self.role, self.trace = role, trace

    def __str__(self) -> str:
        return f"what role {self.role!r} holds could not be looked at: {self.trace.strip().splitlines()[-1]}"


@contextlib.contextmanager
def _looking_at(role: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # a `device_state()` may even end the interpreter
        raise LookError(role, traceback.format_exc()) from error


@attrs.frozen
class Shares:
    """What roles have, where each byte counts once.

    Attributes:
        owned: Bytes by role, kind and device.
        shared: What of its memory counts with another role, by role.
        asleep: What sleeps, by role.
        emptied: What of that comes back as zeros, and is nowhere until then.
        children: What the processes that roles have started have, by role and name.
    """

    owned: dict[str, dict[tuple[str, str], int]]
    shared: dict[str, int]
    asleep: dict[str, int]
    emptied: dict[str, int]
    children: Mapping[str, Mapping[str, int]]


class Accounts:
    """What the roles of a worker have beside what they may have.

    On the lane, a role is looked at when something may have changed what it holds: its own methods, functions, a sleep,
    a wake. Whoever else wants to know looks beside the lane, at everything (`ledger`).

    Attributes:
        budgets: What they may have.
        gradients: What is known of their gradients beside the lane.
        beside: What roles of other groups hold that have workers on the slot, by group, as these told it last.
    """

    def __init__(self, worker_context: WorkerContext, sleeper: Sleeper) -> None:
        self._worker_context = worker_context
        self._sleeper = sleeper
        self.gradients = Gradients(worker_context)
        sleeper.refuse_more = self.refuse_more
        self._held: dict[str, Holdings] = {}
        self._changed: set[str] = set()
        self.budgets: Budgets = NO_BUDGETS
        self.beside: dict[str, Sizes] = {}
        self._last_told: Sizes = {}

    def ledger(self) -> Ledger:
        """Look at everything that the worker holds, beside the lane."""
        worker_context, asleep = self._worker_context, self._sleeper.asleep
        held: dict[str, Holdings] = {}
        leaves: dict[str, list[weakref.ref[Any]]] = {}
        partly: list[str] = []
        for name, role in named(worker_context).items():
            with _looking_at(name):
                declared = role.declared()  # first: it may take long
                with worker_context.looking:
                    held[name], leaves[name], is_all = self._held_beside_lane(role, declared)
            if not is_all:
                partly.append(name)
        for name, pieces in self.gradients.of(leaves).items():
            if name in held:
                held[name][Purpose.GRADIENTS].include(pieces)
        shares = self._counted(held)
        return Ledger(
            shares.owned,
            shares.shared,
            shares.asleep,
            {name: kept for name in leaves if (kept := asleep.kept_awake(name))},
            tuple(partly),
            self._process(),
            _gpu(worker_context.boot.device, worker_context.in_process, worker_context.parts.values()),
            None if worker_context.device.peaks is None else dict(worker_context.device.peaks),
            shares.children,
            self._of_features(),
        )

    def _process(self) -> dict[str, int] | None:
        """Return what the worker's process has; None where that is the driver's."""
        if self._worker_context.empty is None:
            return None
        with open("/proc/self/smaps_rollup") as file:  # what this process was forked from has it, too, and other forks
            shared = next(1024 * int(line.split()[1]) for line in file if line.startswith("Shared_Dirty:"))
        pinned = self._sleeper.offload.pinned  # for a device's memory that sleeps
        return {"private": private_bytes(), "empty": self._worker_context.empty, "pinned": pinned, "shared": shared}

    def _of_features(self) -> dict[str, dict[str, Any]]:
        """Return what features tell of roles, by feature and role."""
        roles = named(self._worker_context)
        told = {
            feature: {name: plain for name, role in roles.items() if (plain := part.told(role)) is not None}
            for feature, part in self._worker_context.parts.items()
        }
        return {feature: of_roles for feature, of_roles in told.items() if of_roles}

    def _held_beside_lane(
        self, role: RoleInstance, declared: Sequence[Any]
    ) -> tuple[Holdings, list[weakref.ref[Any]], bool]:
        """Return what a role holds, its tensors that may have gradients, and whether that is all."""
        found = search(role.instance, apart=beside(self._worker_context, role.name))
        found.noted[Purpose.DECLARED] += declared
        return found.holdings(), [weakref.ref(each) for each in found.leaves], found.complete

    # -- on the lane

    def changed(self, role: str | None) -> None:
        """Note that what a role holds may have changed; None for any of them."""
        roles = named(self._worker_context)
        if role is None:
            self._changed.update(roles)
        elif role in roles:
            self._changed.update({role, *roles[role].ctx._asked})

    def moved(self, role: str) -> None:
        """Memory of a role sleeps, or is there again."""
        self.changed(role)
        self.gradients.moved(role)

    @property
    def count_others(self) -> bool:
        """Whether a budget counts what roles of other groups hold on this slot."""
        return any(limit.is_shared for limit in self.budgets.limits)

    def tell(self, anew: bool = False) -> None:
        """Have other groups on this slot know what the roles have now, where a budget counts that."""
        if self.count_others:
            if anew:
                self._last_told = {}
            with contextlib.suppress(RoleError):  # the next call meets it, too, and raises it
                self.shares()

    def shares(self, more: Mapping[str, Any] | None = None) -> Shares:
        """Return what all roles have; who may have come to hold something else is looked at anew.

        Other groups on this slot are told.
        """
        try:
            for name, role in named(self._worker_context).items():
                if name in self._changed or name not in self._held:
                    with _looking_at(name):
                        self._held[name], _ = held_by(
                            role.instance, role.declared(), beside(self._worker_context, name)
                        )
                    self._changed.discard(name)
            found = self._counted(self._held, more or {})
        except LookError as error:
            raise RoleError(str(error)) from error
        if self.count_others:
            roles = found.owned.keys() | found.asleep.keys()
            own = {role: [self._parts(found, role, device) for device in (True, False)] for role in roles}
            if (told := {role: parts for role, parts in own.items() if any(parts)}) != self._last_told:
                self._last_told = told
                self._worker_context.say(Holds(told))
        return found

    def judge(self, role: str | None, what: str, shares: Shares) -> None:
        """Raise when the roles have more than they may."""
        for limit in self.budgets.limits:
            if role is not None and limit.role not in (None, role):
                continue
            activations = self.budgets.activations.get(role or "", 0) if limit.device else 0
            if self.used(shares, limit) + activations > limit.nbytes:
                kept = f", with {size_text(activations)} to stay free for activations" if activations else ""
                raise self.exceeded(shares, limit, f"after {what}{kept}", activations)

    def refuse_more(self, role: str, nbytes: int, device: bool, wakes: bool) -> None:
        """Raise when there is no room for what a role that sleeps or wakes is about to have besides."""
        # What it may have itself when it is awake is judged after its calls: else it could never let go of something.
        whose = (None,) if wakes else (None, role)
        limits = [each for each in self.budgets.limits if each.device is device and each.role in whose]
        if not (limits and nbytes):
            return
        what = f"waking role {role!r}" if wakes else f"putting role {role!r} to sleep"
        self.changed(role)
        shares = self.shares()
        for limit in limits:
            over = self.used(shares, limit) + nbytes > limit.nbytes
            if over and not (wakes and self.has_outgrown(shares, role, limit, nbytes)):
                raise self.exceeded(shares, limit, f"{what} needs {size_text(nbytes)}", nbytes)

    def has_outgrown(self, shares: Shares, role: str, limit: Limit, nbytes: int) -> bool:
        """Whether a role that wakes is more than a limit allows by itself, and nobody else has what could go.

        It wakes all the same, and its calls are judged when they have run, as before it slept: one may let go of
        something. Else nobody would ever come to what it holds.
        """
        if sum(self._parts(shares, role, limit.device).values()) + nbytes <= limit.nbytes:
            return False
        for other in shares.owned.keys() - {role}:
            if _could_go(self._parts(shares, other, limit.device)) > sum(
                self._sleeper.asleep.kept_awake(other).values()
            ):
                return False
        return not any(_could_go(parts) for _, _, parts in self._others(limit))

    def used(self, shares: Shares, limit: Limit) -> int:
        """Return the bytes that count towards a limit."""
        roles = shares.owned.keys() | shares.asleep.keys() if limit.role is None else {limit.role}
        own = sum(sum(self._parts(shares, role, limit.device).values()) for role in roles)
        return own + sum(sum(parts.values()) for _, _, parts in self._others(limit))

    def _others(self, limit: Limit) -> Iterator[tuple[str, str, Mapping[str, int]]]:
        """Yield group, name and memory by kind of roles of other groups that count towards a limit."""
        for group, roles in sorted(self.beside.items()) if limit.is_shared else ():
            for role, (on_device, on_host) in sorted(roles.items()):
                yield group, role, on_device if limit.device else on_host

    def exceeded(self, shares: Shares, limit: Limit, what: str, more: int) -> MemoryBudgetError:
        """Return the error that a limit is exceeded, or would be."""
        place = self._worker_context.boot.device if limit.device else "the host"
        used = self.used(shares, limit)
        roles = shares.owned.keys() | shares.asleep.keys()
        holders = [self._told(shares, role, limit.device) for role in sorted(roles)]
        holders += [f"of group {group!r}: {_words(role, parts)}" for group, role, parts in self._others(limit) if parts]
        told = "; ".join(filter(None, holders))
        if not limit.device:
            cure = "What sleeps counts, too: let go of something, or allow more"
        elif limit.role is not None or self.budgets.swap or self._worker_context.in_process:  # who can't sleep
            cure = "Let go of something, or allow more"
        else:
            turns = "have a role sleep (group.sleep), let roles take turns (residency='swap')"
            cure = f"Let go of something, {turns}, or allow more"
        return MemoryBudgetError(
            f"{what}, {size_text(used)} of {place} are in use, and {limit.owner} may have {size_text(limit.nbytes)} "
            f"({limit.word}): {size_text(used + more - limit.nbytes)} too much. Who has it: {told or 'nobody'}. {cure}"
        )

    def told(self) -> str:
        """Return who has how much, as a note to an error says it."""
        self.changed(None)
        shares = self.shares()
        places = (False,) if self._worker_context.boot.device == "cpu" else (True, False)
        told = [self._told(shares, each, device) for each in shares.owned for device in places]
        return f"memory of this worker: {'; '.join(filter(None, told)) or 'nothing that its roles hold'}"

    def _told(self, shares: Shares, role: str, device: bool) -> str:
        parts = self._parts(shares, role, device)
        if not parts:
            return ""
        stays = self._sleeper.asleep.kept_awake(role) if device else {}
        but = ", ".join(f"{size_text(size)} {why}" for why, size in stays.items())
        why = f", asleep but for {but}" if but else ""
        return f"{_words(role, parts)}{why}"

    def _parts(self, shares: Shares, role: str, device: bool) -> dict[str, int]:
        """Return what a role has, by kind. What sleeps somewhere counts with the host's memory."""
        here = self._worker_context.boot.device if device else "cpu"
        parts = {kind: size for (kind, where), size in shares.owned.get(role, {}).items() if where == here}
        if not device and (asleep := shares.asleep.get(role, 0) - shares.emptied.get(role, 0)):
            parts["asleep"] = asleep
        if here == "cpu" and (of_children := sum(shares.children.get(role, {}).values())):
            parts[_CHILDREN] = of_children
        return parts

    def _counted(self, held: Mapping[str, Holdings], more: Mapping[str, Any] | None = None) -> Shares:
        """Return what roles have, with their residents; values that are about to be kept are among these."""
        found: dict[str, Holdings] = {name: {**each, Purpose.RESIDENTS: Storages()} for name, each in held.items()}
        residents: dict[str, list[Any]] = {}  # "": of functions
        for maker, value in [*self._worker_context.store.values(), *(more or {}).items()]:
            owner, _, method = maker.partition(".")
            residents.setdefault(owner if method else "", []).append(value)
        for owner, values in residents.items():
            kept = found.setdefault(owner, {}).setdefault(Purpose.RESIDENTS, Storages())
            with _looking_at(owner):
                holdings, _ = lie_in(values, beside(self._worker_context))
            for pieces in holdings.values():
                kept.include(pieces)
        owned, shared = _shares(found, self._sleeper.asleep.kept_addresses())
        for name in held:
            with _looking_at(name):
                managed = self._worker_context.roles[name].managed()
            for purpose, size in managed.items():
                kind = purpose.word, self._worker_context.boot.device
                if size:
                    owned[name][kind] = owned[name].get(kind, 0) + size
        asleep, emptied = dict.fromkeys(found, 0), dict.fromkeys(found, 0)
        for name, (size, as_zeros) in self._sleeper.asleep.by_role().items():
            asleep[name], emptied[name] = size, as_zeros
        outside: dict[str, dict[str, int]] = {}
        for part in self._worker_context.parts.values():
            for name, sizes in part.nbytes().items():
                outside.setdefault(name, {}).update(sizes)
        return Shares(owned, shared, asleep, emptied, outside)


def _words(role: str, parts: Mapping[str, int]) -> str:
    """Return what a role has, by kind, as errors say it."""
    order = [*(purpose.word for purpose in Purpose), "asleep", _CHILDREN]
    kinds = ", ".join(f"{kind} {size_text(parts[kind])}" for kind in order if kind in parts)
    return f"{role or 'functions'} {size_text(sum(parts.values()))} ({kinds})"


def _could_go(parts: Mapping[str, int]) -> int:
    """Return the bytes of what a role has that a sleep could move."""
    return sum(parts.values()) - parts.get(Purpose.RESIDENTS.word, 0) - parts.get(_CHILDREN, 0)


def _shares(
    held: Mapping[str, Holdings], absent: Collection[int]
) -> tuple[dict[str, dict[tuple[str, str], int]], dict[str, int]]:
    """Return what each role has, and what of that counts with others; `absent` has addresses where memory sleeps.

    What several hold counts as the first of the kinds that it is of, with the first of the roles for which it is that.
    """
    owners: dict[str, dict[int, str]] = {}
    owned: dict[str, dict[tuple[str, str], int]] = {role: {} for role in held}
    shared: dict[str, dict[tuple[str, int], int]] = {role: {} for role in held}
    counted, without_memory = _once(held), frozenset(absent)
    for purpose in Purpose:
        for role, found in held.items():
            for device, pieces in found.get(purpose, {}).items():
                if counted and device == "cpu":
                    pieces = {each: counted[each] for each in pieces}
                its_owners, first = owners.setdefault(device, {}), pieces
                if known := its_owners.keys() & pieces.keys():
                    shared[role] |= {(device, each): pieces[each] for each in known if its_owners[each] != role}
                    first = {each: nbytes for each, nbytes in pieces.items() if each not in known}
                its_owners |= dict.fromkeys(first, role)
                nbytes = sum(first.values()) - sum(map(first.__getitem__, first.keys() & without_memory))
                if nbytes:
                    owned[role][purpose.word, device] = nbytes
    return owned, {role: sum(pieces.values()) for role, pieces in shared.items()}


def _once(held: Mapping[str, Holdings]) -> dict[int, int]:
    """Sizes of pieces of the host's memory without what lies in others, too; nothing where none can."""
    found = [pieces for holdings in held.values() for pieces in holdings.values()]
    if not any(pieces.has_arrays for pieces in found):
        return {}
    whole = Storages()
    for pieces in found:
        whole.include(pieces)
    counted: dict[int, int] = {}
    end = 0
    for start, size in sorted(whole.get("cpu", {}).items()):
        counted[start] = max(0, start + size - max(start, end))
        end = max(end, start + size)
    return counted


def _gpu(device: str, in_process: bool = False, parts: Iterable[OfWorker] = ()) -> dict[str, int] | None:
    module = in_use(device)
    if module is None:
        return None
    with beside_captures(device):
        free, total = module.mem_get_info(device)
    without_memory, of_tensors = absent(device)
    found = {"used": total - free, "total": total}
    with contextlib.suppress(RuntimeError):  # another allocator is in the place of torch's, and keeps no such books
        found["allocated"] = module.memory_allocated(device) - of_tensors
        found["reserved"] = module.memory_reserved(device) - without_memory
    if in_process:  # then those of other slots are there, too
        return found
    with LOOKING:
        for part in parts:
            found.update(part.of_device())
    return found


class Gradients:
    """The gradients of a worker's roles, for threads that must not look at them while role code runs.

    Amid `parameter.grad = None` torch lets go of Python's lock while `parameter.grad` still leads to what is being
    freed: who reads it on another thread then gets a tensor without a storage, and the process a SIGSEGV. So they are
    known as they were between two calls, or where their role's memory has moved since.
    """

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self._lock = threading.Lock()
        self._asked = threading.Event()
        self._asked.set()
        self._leaves: Mapping[str, list[weakref.ref[Any]]] | None = None
        self._known: Mapping[str, Storages] = {}

    def of(self, leaves: Mapping[str, list[weakref.ref[Any]]]) -> Mapping[str, Storages]:
        """Return them by role: of just now where the lane comes soon, else of the last time that somebody has asked."""
        with self._lock:
            asked = self._asked
            if asked.is_set():
                asked = self._asked = threading.Event()
                self._leaves = leaves
                self._worker_context.lane.do(partial(self._look, asked))
        asked.wait(_WITHIN_S)
        self._leaves = None  # a call that takes long may have others when it ends
        return self._known

    @property
    def is_due(self) -> bool:
        """Whether the lane hasn't come yet to a look."""
        return not self._asked.is_set()

    def moved(self, role: str) -> None:
        """Memory of a role sleeps, or is there again: its gradients are elsewhere. On the lane."""
        if role in self._known:
            self._known = {**{name: each for name, each in self._known.items() if name != role}, **self._of([role])}

    def _look(self, asked: threading.Event) -> None:
        self._known = self._of(list(named(self._worker_context)), self._leaves)
        asked.set()

    def _of(
        self, names: Iterable[str], leaves: Mapping[str, list[weakref.ref[Any]]] | None = None
    ) -> dict[str, Storages]:
        known: dict[str, Storages] = {}
        for name in names if leaves is None else leaves:
            with contextlib.suppress(Exception):  # so does the look of who has asked, who tells it
                if leaves is None:
                    tensors = search(
                        named(self._worker_context)[name].instance, apart=beside(self._worker_context, name)
                    ).leaves
                else:
                    tensors = [each for ref in leaves[name] if (each := ref()) is not None]
                gradients = Storages()
                gradients.add_all(gradients_of(tensors))
                known[name] = gradients
        return known

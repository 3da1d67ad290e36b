"""Counts the memory of a worker's roles, each byte once, and compares the result with the memory budgets."""

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

# Seconds that an inspection waits for the lane, which a long call may occupy. Users expect an answer within a second.
_WITHIN_S = 0.2
_CHILDREN = "children"


class LookError(Exception):
    """Raised if a role's memory can't be inspected, for example because `device_state()` has raised an error.

    A tensor subclass or a concurrent change of the role may be the cause, too. The arguments are the role's name and
    the traceback.
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
    except BaseException as error:  # Role code such as `device_state()` may even raise SystemExit.
        raise LookError(role, traceback.format_exc()) from error


@attrs.frozen
class Shares:
    """The memory of a worker's roles, with each byte counted for one role only.

    Attributes:
        owned: Bytes by role, kind and device.
        shared: Bytes that a role holds and that count with another role, by role.
        asleep: Bytes that sleep, by role.
        emptied: Bytes of `asleep` without a copy; a wake fills this memory with zeros.
        children: Bytes of the processes that roles have started, by role and name.
    """

    owned: dict[str, dict[tuple[str, str], int]]
    shared: dict[str, int]
    asleep: dict[str, int]
    emptied: dict[str, int]
    children: Mapping[str, Mapping[str, int]]


class Accounts:
    """Measures the memory of a worker's roles, and compares the result with the memory budgets.

    The lane inspects a role after a method, a function, a sleep or a wake, because the role's memory may have changed.
    Other threads inspect all roles (`ledger`).

    Attributes:
        budgets: The memory budgets.
        gradients: The last known gradients, for threads other than the lane.
        beside: The last reported holdings of other groups' roles on this slot, by group.
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
        """Return the worker's memory use. Called on any thread but the lane."""
        worker_context, asleep = self._worker_context, self._sleeper.asleep
        held: dict[str, Holdings] = {}
        leaves: dict[str, list[weakref.ref[Any]]] = {}
        partly: list[str] = []
        for name, role in named(worker_context).items():
            with _looking_at(name):
                declared = role.declared()  # Role code may be slow, so the lock is taken afterwards.
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
            {name: awake for name in leaves if (awake := asleep.kept_awake(name))},
            tuple(partly),
            self._process(),
            _gpu(worker_context.boot.device, worker_context.in_process, worker_context.parts.values()),
            None if worker_context.device.peaks is None else dict(worker_context.device.peaks),
            shares.children,
            self._of_features(),
        )

    def _process(self) -> dict[str, int] | None:
        """Return the memory of the worker's process, or None if the worker runs in the driver's process."""
        if self._worker_context.empty is None:
            return None
        # `Shared_Dirty` counts the pages that are shared with the template process and other forks.
        with open("/proc/self/smaps_rollup") as file:
            shared = next(1024 * int(line.split()[1]) for line in file if line.startswith("Shared_Dirty:"))
        pinned = self._sleeper.offload.pinned
        return {"private": private_bytes(), "empty": self._worker_context.empty, "pinned": pinned, "shared": shared}

    def _of_features(self) -> dict[str, dict[str, Any]]:
        roles = named(self._worker_context)
        reports = {
            feature: {name: plain for name, role in roles.items() if (plain := part.told(role)) is not None}
            for feature, part in self._worker_context.parts.items()
        }
        return {feature: of_roles for feature, of_roles in reports.items() if of_roles}

    def _held_beside_lane(
        self, role: RoleInstance, declared: Sequence[Any]
    ) -> tuple[Holdings, list[weakref.ref[Any]], bool]:
        """Return a role's holdings, the tensors that may have gradients, and whether the search was complete."""
        search_result = search(role.instance, apart=beside(self._worker_context, role.name))
        search_result.noted[Purpose.DECLARED] += declared
        return search_result.holdings(), [weakref.ref(leaf) for leaf in search_result.leaves], search_result.complete

    # -- on the lane

    def changed(self, role: str | None) -> None:
        """Mark a role for a new inspection, or all roles if `role` is None."""
        roles = named(self._worker_context)
        if role is None:
            self._changed.update(roles)
        elif role in roles:
            self._changed.update({role, *roles[role].ctx._asked})

    def moved(self, role: str) -> None:
        """Mark a role for a new inspection after a sleep or wake, and record the role's gradients again."""
        self.changed(role)
        self.gradients.moved(role)

    @property
    def count_others(self) -> bool:
        """Whether a budget also counts the memory of other groups' roles on this slot."""
        return any(limit.is_shared for limit in self.budgets.limits)

    def tell(self, anew: bool = False) -> None:
        """Send changes of the roles' memory use to other groups on this slot, if a budget is shared between groups.

        With `anew`, unchanged figures are sent, too.
        """
        if self.count_others:
            if anew:
                self._last_told = {}
            with contextlib.suppress(RoleError):  # The next call raises this error again.
                self.shares()

    def shares(self, more: Mapping[str, Any] | None = None) -> Shares:
        """Inspect changed roles again, and return the memory of all roles.

        Results that are about to be stored (`more`) count, too. Other groups on this slot are notified of a change.
        """
        try:
            for name, role in named(self._worker_context).items():
                if name in self._changed or name not in self._held:
                    with _looking_at(name):
                        self._held[name], _ = held_by(
                            role.instance, role.declared(), beside(self._worker_context, name)
                        )
                    self._changed.discard(name)
            shares = self._counted(self._held, more or {})
        except LookError as error:
            raise RoleError(str(error)) from error
        if self.count_others:
            roles = shares.owned.keys() | shares.asleep.keys()
            parts_of_roles = {role: [self._parts(shares, role, device) for device in (True, False)] for role in roles}
            if (report := {role: parts for role, parts in parts_of_roles.items() if any(parts)}) != self._last_told:
                self._last_told = report
                self._worker_context.say(Holds(report))
        return shares

    def judge(self, role: str | None, what: str, shares: Shares) -> None:
        """Raise a `MemoryBudgetError` if the roles exceed a limit."""
        for limit in self.budgets.limits:
            if role is not None and limit.role not in (None, role):
                continue
            activations = self.budgets.activations.get(role or "", 0) if limit.device else 0
            if self.used(shares, limit) + activations > limit.nbytes:
                reserve = f", with {size_text(activations)} to stay free for activations" if activations else ""
                raise self.exceeded(shares, limit, f"after {what}{reserve}", activations)

    def refuse_more(self, role: str, nbytes: int, device: bool, wakes: bool) -> None:
        """Raise a `MemoryBudgetError` if a budget has no room for the `nbytes` that a role's sleep or wake needs."""
        # A waking role's own limit is checked after calls, because the role may free memory in a call.
        owners = (None,) if wakes else (None, role)
        limits = [
            role_limit
            for role_limit in self.budgets.limits
            if role_limit.device is device and role_limit.role in owners
        ]
        if not (limits and nbytes):
            return
        action = f"waking role {role!r}" if wakes else f"putting role {role!r} to sleep"
        self.changed(role)
        shares = self.shares()
        for limit in limits:
            over = self.used(shares, limit) + nbytes > limit.nbytes
            if over and not (wakes and self.has_outgrown(shares, role, limit, nbytes)):
                raise self.exceeded(shares, limit, f"{action} needs {size_text(nbytes)}", nbytes)

    def has_outgrown(self, shares: Shares, role: str, limit: Limit, nbytes: int) -> bool:
        """Return whether a waking role alone exceeds a limit while no other role has memory that could be moved.

        Such a role wakes nonetheless, because a refusal would make its memory unreachable forever. Its next call may
        free memory, and is checked afterwards.
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
        own_bytes = sum(sum(self._parts(shares, role, limit.device).values()) for role in roles)
        return own_bytes + sum(sum(parts.values()) for _, _, parts in self._others(limit))

    def _others(self, limit: Limit) -> Iterator[tuple[str, str, Mapping[str, int]]]:
        for group, roles in sorted(self.beside.items()) if limit.is_shared else ():
            for role, (on_device, on_host) in sorted(roles.items()):
                yield group, role, on_device if limit.device else on_host

    def exceeded(self, shares: Shares, limit: Limit, what: str, more: int) -> MemoryBudgetError:
        """Return the error about an exceeded limit. `more` is the number of requested bytes that aren't in use yet."""
        place = self._worker_context.boot.device if limit.device else "the host"
        used = self.used(shares, limit)
        roles = shares.owned.keys() | shares.asleep.keys()
        holders = [self._told(shares, role, limit.device) for role in sorted(roles)]
        holders += [f"of group {group!r}: {_words(role, parts)}" for group, role, parts in self._others(limit) if parts]
        holders_text = "; ".join(filter(None, holders))
        if not limit.device:
            cure = "What sleeps counts, too: let go of something, or allow more"
        elif limit.role is not None or self.budgets.swap or self._worker_context.in_process:  # Roles can't sleep here.
            cure = "Let go of something, or allow more"
        else:
            turns = "have a role sleep (group.sleep), let roles take turns (residency='swap')"
            cure = f"Let go of something, {turns}, or allow more"
        return MemoryBudgetError(
            f"{what}, {size_text(used)} of {place} are in use, and {limit.owner} may have {size_text(limit.nbytes)} "
            f"({limit.word}): {size_text(used + more - limit.nbytes)} too much. Who has it: "
            f"{holders_text or 'nobody'}. {cure}"
        )

    def told(self) -> str:
        """Return a text about the memory of all roles, to be added to an error."""
        self.changed(None)
        shares = self.shares()
        places = (False,) if self._worker_context.boot.device == "cpu" else (True, False)
        texts = [self._told(shares, role, device) for role in shares.owned for device in places]
        return f"memory of this worker: {'; '.join(filter(None, texts)) or 'nothing that its roles hold'}"

    def _told(self, shares: Shares, role: str, device: bool) -> str:
        parts = self._parts(shares, role, device)
        if not parts:
            return ""
        stays = self._sleeper.asleep.kept_awake(role) if device else {}
        but = ", ".join(f"{size_text(size)} {why}" for why, size in stays.items())
        why = f", asleep but for {but}" if but else ""
        return f"{_words(role, parts)}{why}"

    def _parts(self, shares: Shares, role: str, device: bool) -> dict[str, int]:
        """Return a role's bytes on the device or the host, by kind. Sleeping memory counts as host memory."""
        place = self._worker_context.boot.device if device else "cpu"
        parts = {kind: size for (kind, where), size in shares.owned.get(role, {}).items() if where == place}
        if not device and (asleep := shares.asleep.get(role, 0) - shares.emptied.get(role, 0)):
            parts["asleep"] = asleep
        if place == "cpu" and (of_children := sum(shares.children.get(role, {}).values())):
            parts[_CHILDREN] = of_children
        return parts

    def _counted(self, held: Mapping[str, Holdings], more: Mapping[str, Any] | None = None) -> Shares:
        """Return the memory of roles and residents, including results that are about to be stored (`more`)."""
        combined: dict[str, Holdings] = {
            name: {**role_holdings, Purpose.RESIDENTS: Storages()} for name, role_holdings in held.items()
        }
        residents: dict[str, list[Any]] = {}  # The key "" holds the residents of functions.
        for maker, value in [*self._worker_context.store.values(), *(more or {}).items()]:
            owner, _, method = maker.partition(".")
            residents.setdefault(owner if method else "", []).append(value)
        for owner, values in residents.items():
            role_residents = combined.setdefault(owner, {}).setdefault(Purpose.RESIDENTS, Storages())
            with _looking_at(owner):
                holdings, _ = lie_in(values, beside(self._worker_context))
            for pieces in holdings.values():
                role_residents.include(pieces)
        owned, shared = _shares(combined, self._sleeper.asleep.kept_addresses())
        for name in held:
            with _looking_at(name):
                managed = self._worker_context.roles[name].managed()
            for purpose, size in managed.items():
                kind = purpose.word, self._worker_context.boot.device
                if size:
                    owned[name][kind] = owned[name].get(kind, 0) + size
        asleep, emptied = dict.fromkeys(combined, 0), dict.fromkeys(combined, 0)
        for name, (size, as_zeros) in self._sleeper.asleep.by_role().items():
            asleep[name], emptied[name] = size, as_zeros
        outside: dict[str, dict[str, int]] = {}
        for part in self._worker_context.parts.values():
            for name, sizes in part.nbytes().items():
                outside.setdefault(name, {}).update(sizes)
        return Shares(owned, shared, asleep, emptied, outside)


def _words(role: str, parts: Mapping[str, int]) -> str:
    order = [*(purpose.word for purpose in Purpose), "asleep", _CHILDREN]
    kinds = ", ".join(f"{kind} {size_text(parts[kind])}" for kind in order if kind in parts)
    return f"{role or 'functions'} {size_text(sum(parts.values()))} ({kinds})"


def _could_go(parts: Mapping[str, int]) -> int:
    """Return how many bytes of a role a sleep could move."""
    return sum(parts.values()) - parts.get(Purpose.RESIDENTS.word, 0) - parts.get(_CHILDREN, 0)


def _shares(
    held: Mapping[str, Holdings], absent: Collection[int]
) -> tuple[dict[str, dict[tuple[str, str], int]], dict[str, int]]:
    """Return each role's own bytes by kind and device, and the bytes that each role shares with others.

    Memory that several roles hold counts once, under its first kind and for the first role that holds it as that kind.
    Storages at the addresses `absent` sleep in place and count as 0 bytes.
    """
    owners: dict[str, dict[int, str]] = {}
    owned: dict[str, dict[tuple[str, str], int]] = {role: {} for role in held}
    shared: dict[str, dict[tuple[str, int], int]] = {role: {} for role in held}
    counted, without_memory = _once(held), frozenset(absent)
    for purpose in Purpose:
        for role, holdings in held.items():
            for device, pieces in holdings.get(purpose, {}).items():
                if counted and device == "cpu":
                    pieces = {piece: counted[piece] for piece in pieces}
                its_owners, first = owners.setdefault(device, {}), pieces
                if known_pieces := its_owners.keys() & pieces.keys():
                    shared[role] |= {
                        (device, piece): pieces[piece] for piece in known_pieces if its_owners[piece] != role
                    }
                    first = {piece: nbytes for piece, nbytes in pieces.items() if piece not in known_pieces}
                its_owners |= dict.fromkeys(first, role)
                nbytes = sum(first.values()) - sum(map(first.__getitem__, first.keys() & without_memory))
                if nbytes:
                    owned[role][purpose.word, device] = nbytes
    return owned, {role: sum(pieces.values()) for role, pieces in shared.items()}


def _once(held: Mapping[str, Holdings]) -> dict[int, int]:
    """Return the sizes of host storages by address, with overlapping bytes counted once; empty if none can overlap."""
    storages = [pieces for holdings in held.values() for pieces in holdings.values()]
    if not any(pieces.has_arrays for pieces in storages):
        return {}
    whole = Storages()
    for pieces in storages:
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
    sizes = {"used": total - free, "total": total}
    with contextlib.suppress(RuntimeError):  # An allocator that replaces torch's may have no statistics.
        sizes["allocated"] = module.memory_allocated(device) - of_tensors
        sizes["reserved"] = module.memory_reserved(device) - without_memory
    if in_process:  # In one process for all slots, the figures below would include other slots' groups.
        return sizes
    with LOOKING:
        for part in parts:
            sizes.update(part.of_device())
    return sizes


class Gradients:
    """Records the gradients of a worker's roles for threads that mustn't read `.grad` while role code runs.

    During `parameter.grad = None` torch releases the GIL while `parameter.grad` still refers to the freed tensor. A
    read on another thread gets a tensor without a storage, and the process crashes (SIGSEGV). So gradients are
    recorded between two calls, and after their role's memory has moved.
    """

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self._lock = threading.Lock()
        self._asked = threading.Event()
        self._asked.set()
        self._leaves: Mapping[str, list[weakref.ref[Any]]] | None = None
        self._known: Mapping[str, Storages] = {}

    def of(self, leaves: Mapping[str, list[weakref.ref[Any]]]) -> Mapping[str, Storages]:
        """Return the gradients by role. If the lane doesn't answer in time, return the last known gradients."""
        with self._lock:
            request = self._asked
            if request.is_set():
                request = self._asked = threading.Event()
                self._leaves = leaves
                self._worker_context.lane.do(partial(self._look, request))
        request.wait(_WITHIN_S)
        self._leaves = None  # Drop the list, because a long call may replace the tensors before the inspection runs.
        return self._known

    @property
    def is_due(self) -> bool:
        """Whether a queued inspection of gradients is still pending."""
        return not self._asked.is_set()

    def moved(self, role: str) -> None:
        """Record a role's gradients again after a sleep or wake. Called on the lane."""
        if role in self._known:
            self._known = {
                **{name: gradients for name, gradients in self._known.items() if name != role},
                **self._of([role]),
            }

    def _look(self, asked: threading.Event) -> None:
        self._known = self._of(list(named(self._worker_context)), self._leaves)
        asked.set()

    def _of(
        self, names: Iterable[str], leaves: Mapping[str, list[weakref.ref[Any]]] | None = None
    ) -> dict[str, Storages]:
        gradients_by_role: dict[str, Storages] = {}
        for name in names if leaves is None else leaves:
            with contextlib.suppress(Exception):  # The caller's own search reports such an error.
                if leaves is None:
                    tensors = search(
                        named(self._worker_context)[name].instance, apart=beside(self._worker_context, name)
                    ).leaves
                else:
                    tensors = [tensor for ref in leaves[name] if (tensor := ref()) is not None]
                gradients = Storages()
                gradients.add_all(gradients_of(tensors))
                gradients_by_role[name] = gradients
        return gradients_by_role

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
from colocate._system.numbers import format_size
from colocate._system.room import read_private_bytes
from colocate.errors import MemoryBudgetError, RoleError
from colocate.features.memory.messages import Ledger, RoleHoldings, Sizes
from colocate.features.memory.sleep import Sleeper
from colocate.features.memory.vmm import count_absent
from colocate.gpus import in_use
from colocate.worker.context import WorkerContext, get_roles_by_name, list_excluded_objects
from colocate.worker.holdings import Holdings, Storages, find_holdings, find_resident_holdings, list_gradients, search
from colocate.worker.hooks import WorkerFeature
from colocate.worker.serving.failure import INSPECTION_LOCK
from colocate.worker.serving.role_instance import RoleInstance

# Seconds that an inspection waits for the lane, which a long call may occupy. Users expect an answer within a second.
_WITHIN_S = 0.2
_CHILDREN = "children"


class InspectionError(Exception):
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
def _inspecting(role: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # Role code such as `device_state()` may even raise SystemExit.
        raise InspectionError(role, traceback.format_exc()) from error


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
    Other threads inspect all roles (`build_ledger`).

    Attributes:
        budgets: The memory budgets.
        gradients: The last known gradients, for threads other than the lane.
        neighbours: The last reported holdings of other groups' roles on this slot, by group.
    """

    def __init__(self, worker_context: WorkerContext, sleeper: Sleeper) -> None:
        self._worker_context = worker_context
        self._sleeper = sleeper
        self.gradients = Gradients(worker_context)
        sleeper.refuse_more = self.check_room
        self._holdings: dict[str, Holdings] = {}
        self._changed: set[str] = set()
        self.budgets: Budgets = NO_BUDGETS
        self.neighbours: dict[str, Sizes] = {}
        self._last_report: Sizes = {}

    def build_ledger(self) -> Ledger:
        """Return the worker's memory use. Called on any thread but the lane."""
        worker_context, asleep = self._worker_context, self._sleeper.asleep
        held: dict[str, Holdings] = {}
        leaves: dict[str, list[weakref.ref[Any]]] = {}
        partly: list[str] = []
        for name, role in get_roles_by_name(worker_context).items():
            with _inspecting(name):
                declared = role.list_declared()  # This may run slow role code, so take the lock only afterwards.
                with worker_context.inspection_lock:
                    held[name], leaves[name], is_all = self._search_role(role, declared)
            if not is_all:
                partly.append(name)
        for name, pieces in self.gradients.by_role(leaves).items():
            if name in held:
                held[name][Purpose.GRADIENTS].add_storages(pieces)
        shares = self._count_shares(held)
        return Ledger(
            shares.owned,
            shares.shared,
            shares.asleep,
            {name: awake for name in leaves if (awake := asleep.awake_bytes(name))},
            tuple(partly),
            self._process_bytes(),
            _read_gpu(worker_context.boot.device, worker_context.in_process, worker_context.parts.values()),
            None if worker_context.device.peaks is None else dict(worker_context.device.peaks),
            shares.children,
            self._feature_reports(),
        )

    def _process_bytes(self) -> dict[str, int] | None:
        """Return the memory of the worker's process, or None if the worker runs in the driver's process."""
        if self._worker_context.baseline_bytes is None:
            return None
        # `Shared_Dirty` counts the pages that are shared with the template process and other forks.
        with open("/proc/self/smaps_rollup") as file:
            shared = next(1024 * int(line.split()[1]) for line in file if line.startswith("Shared_Dirty:"))
        pinned = self._sleeper.offload.pinned_bytes
        return {
            "private": read_private_bytes(),
            "empty": self._worker_context.baseline_bytes,
            "pinned": pinned,
            "shared": shared,
        }

    def _feature_reports(self) -> dict[str, dict[str, Any]]:
        roles = get_roles_by_name(self._worker_context)
        reports = {
            feature: {name: plain for name, role in roles.items() if (plain := part.describe_role(role)) is not None}
            for feature, part in self._worker_context.parts.items()
        }
        return {feature: of_roles for feature, of_roles in reports.items() if of_roles}

    def _search_role(
        self, role: RoleInstance, declared: Sequence[Any]
    ) -> tuple[Holdings, list[weakref.ref[Any]], bool]:
        """Return a role's holdings, the tensors that may have gradients, and whether the search was complete."""
        search_result = search(role.instance, apart=list_excluded_objects(self._worker_context, role.name))
        search_result.values_by_purpose[Purpose.DECLARED] += declared
        return (
            search_result.to_holdings(),
            [weakref.ref(leaf) for leaf in search_result.leaf_tensors],
            search_result.is_complete,
        )

    # -- on the lane

    def mark_changed(self, role: str | None) -> None:
        """Mark a role for a new inspection, or all roles if `role` is None."""
        roles = get_roles_by_name(self._worker_context)
        if role is None:
            self._changed.update(roles)
        elif role in roles:
            self._changed.update({role, *roles[role].ctx._asked_siblings})

    def on_moved(self, role: str) -> None:
        """Mark a role for a new inspection after a sleep or wake, and record the role's gradients again."""
        self.mark_changed(role)
        self.gradients.on_moved(role)

    @property
    def counts_others(self) -> bool:
        """Whether a budget also counts the memory of other groups' roles on this slot."""
        return any(limit.is_shared for limit in self.budgets.limits)

    def share_holdings(self, anew: bool = False) -> None:
        """Send changes of the roles' memory use to other groups on this slot, if a budget is shared between groups.

        With `anew`, unchanged figures are sent, too.
        """
        if self.counts_others:
            if anew:
                self._last_report = {}
            with contextlib.suppress(RoleError):  # The next call raises this error again.
                self.compute_shares()

    def compute_shares(self, more: Mapping[str, Any] | None = None) -> Shares:
        """Inspect changed roles again, and return the memory of all roles.

        Results that are about to be stored (`more`) count, too. Other groups on this slot are notified of a change.
        """
        try:
            for name, role in get_roles_by_name(self._worker_context).items():
                if name in self._changed or name not in self._holdings:
                    with _inspecting(name):
                        self._holdings[name], _ = find_holdings(
                            role.instance, role.list_declared(), list_excluded_objects(self._worker_context, name)
                        )
                    self._changed.discard(name)
            shares = self._count_shares(self._holdings, more or {})
        except InspectionError as error:
            raise RoleError(str(error)) from error
        if self.counts_others:
            roles = shares.owned.keys() | shares.asleep.keys()
            parts_of_roles = {
                role: [self._role_parts(shares, role, device) for device in (True, False)] for role in roles
            }
            if (report := {role: parts for role, parts in parts_of_roles.items() if any(parts)}) != self._last_report:
                self._last_report = report
                self._worker_context.send_message(RoleHoldings(report))
        return shares

    def check_limits(self, role: str | None, what: str, shares: Shares) -> None:
        """Raise a `MemoryBudgetError` if the roles exceed a limit."""
        for limit in self.budgets.limits:
            if role is not None and limit.role not in (None, role):
                continue
            activations = self.budgets.activations.get(role or "", 0) if limit.device else 0
            if self.used_bytes(shares, limit) + activations > limit.nbytes:
                reserve = f", with {format_size(activations)} to stay free for activations" if activations else ""
                raise self.budget_error(shares, limit, f"after {what}{reserve}", activations)

    def check_room(self, role: str, nbytes: int, device: bool, wakes: bool) -> None:
        """Raise a `MemoryBudgetError` if a budget has no room for the `nbytes` that a role's sleep or wake needs."""
        # Check a waking role's own limit only after its next call, because that call may free memory.
        owners = (None,) if wakes else (None, role)
        limits = [
            role_limit
            for role_limit in self.budgets.limits
            if role_limit.device is device and role_limit.role in owners
        ]
        if not (limits and nbytes):
            return
        action = f"waking role {role!r}" if wakes else f"putting role {role!r} to sleep"
        self.mark_changed(role)
        shares = self.compute_shares()
        for limit in limits:
            over = self.used_bytes(shares, limit) + nbytes > limit.nbytes
            if over and not (wakes and self.has_outgrown(shares, role, limit, nbytes)):
                raise self.budget_error(shares, limit, f"{action} needs {format_size(nbytes)}", nbytes)

    def has_outgrown(self, shares: Shares, role: str, limit: Limit, nbytes: int) -> bool:
        """Return whether a waking role alone exceeds a limit while no other role has memory that could be moved.

        Such a role wakes nonetheless, because a refusal would make its memory unreachable forever. Its next call may
        free memory, and is checked afterwards.
        """
        if sum(self._role_parts(shares, role, limit.device).values()) + nbytes <= limit.nbytes:
            return False
        for other in shares.owned.keys() - {role}:
            if _movable_bytes(self._role_parts(shares, other, limit.device)) > sum(
                self._sleeper.asleep.awake_bytes(other).values()
            ):
                return False
        return not any(_movable_bytes(parts) for _, _, parts in self._other_groups(limit))

    def used_bytes(self, shares: Shares, limit: Limit) -> int:
        """Return the bytes that count towards a limit."""
        roles = shares.owned.keys() | shares.asleep.keys() if limit.role is None else {limit.role}
        own_bytes = sum(sum(self._role_parts(shares, role, limit.device).values()) for role in roles)
        return own_bytes + sum(sum(parts.values()) for _, _, parts in self._other_groups(limit))

    def _other_groups(self, limit: Limit) -> Iterator[tuple[str, str, Mapping[str, int]]]:
        for group, roles in sorted(self.neighbours.items()) if limit.is_shared else ():
            for role, (on_device, on_host) in sorted(roles.items()):
                yield group, role, on_device if limit.device else on_host

    def budget_error(self, shares: Shares, limit: Limit, what: str, more: int) -> MemoryBudgetError:
        """Return the error about an exceeded limit. `more` is the number of requested bytes that aren't in use yet."""
        place = self._worker_context.boot.device if limit.device else "the host"
        used = self.used_bytes(shares, limit)
        roles = shares.owned.keys() | shares.asleep.keys()
        holders = [self._describe_role(shares, role, limit.device) for role in sorted(roles)]
        holders += [
            f"of group {group!r}: {_describe_parts(role, parts)}"
            for group, role, parts in self._other_groups(limit)
            if parts
        ]
        holders_text = "; ".join(filter(None, holders))
        if not limit.device:
            cure = "Sleeping memory counts, too: free memory, or raise the budget"
        elif limit.role is not None or self.budgets.swap or self._worker_context.in_process:  # A sleep is no cure.
            cure = "Free memory, or raise the budget"
        else:
            turns = "put a role to sleep (group.sleep), let roles take turns (residency='swap')"
            cure = f"Free memory, {turns}, or raise the budget"
        return MemoryBudgetError(
            f"{what}, {format_size(used)} of {place} are in use, and {limit.owner} may have "
            f"{format_size(limit.nbytes)} "
            f"({limit.word}): {format_size(used + more - limit.nbytes)} too much. Held by: "
            f"{holders_text or 'nobody'}. {cure}"
        )

    def describe(self) -> str:
        """Return a text about the memory of all roles, to be added to an error."""
        self.mark_changed(None)
        shares = self.compute_shares()
        places = (False,) if self._worker_context.boot.device == "cpu" else (True, False)
        texts = [self._describe_role(shares, role, device) for role in shares.owned for device in places]
        return f"memory of this worker: {'; '.join(filter(None, texts)) or 'nothing that its roles hold'}"

    def _describe_role(self, shares: Shares, role: str, device: bool) -> str:
        parts = self._role_parts(shares, role, device)
        if not parts:
            return ""
        stays = self._sleeper.asleep.awake_bytes(role) if device else {}
        but = ", ".join(f"{format_size(size)} {why}" for why, size in stays.items())
        why = f", asleep but for {but}" if but else ""
        return f"{_describe_parts(role, parts)}{why}"

    def _role_parts(self, shares: Shares, role: str, device: bool) -> dict[str, int]:
        """Return a role's bytes on the device or the host, by kind. Sleeping memory counts as host memory."""
        place = self._worker_context.boot.device if device else "cpu"
        parts = {kind: size for (kind, where), size in shares.owned.get(role, {}).items() if where == place}
        if not device and (asleep := shares.asleep.get(role, 0) - shares.emptied.get(role, 0)):
            parts["asleep"] = asleep
        if place == "cpu" and (of_children := sum(shares.children.get(role, {}).values())):
            parts[_CHILDREN] = of_children
        return parts

    def _count_shares(self, held: Mapping[str, Holdings], more: Mapping[str, Any] | None = None) -> Shares:
        """Return the memory of roles and residents, including results that are about to be stored (`more`)."""
        combined: dict[str, Holdings] = {
            name: {**role_holdings, Purpose.RESIDENTS: Storages()} for name, role_holdings in held.items()
        }
        residents: dict[str, list[Any]] = {}  # The key "" stands for functions, which have no role.
        for maker, value in [*self._worker_context.store.list_values(), *(more or {}).items()]:
            owner, _, method = maker.partition(".")
            residents.setdefault(owner if method else "", []).append(value)
        for owner, values in residents.items():
            role_residents = combined.setdefault(owner, {}).setdefault(Purpose.RESIDENTS, Storages())
            with _inspecting(owner):
                holdings, _ = find_resident_holdings(values, list_excluded_objects(self._worker_context))
            for pieces in holdings.values():
                role_residents.add_storages(pieces)
        owned, shared = _split_shares(combined, self._sleeper.asleep.fixed_addresses())
        for name in held:
            with _inspecting(name):
                managed = self._worker_context.roles[name].get_managed_bytes()
            for purpose, size in managed.items():
                kind = purpose.word, self._worker_context.boot.device
                if size:
                    owned[name][kind] = owned[name].get(kind, 0) + size
        asleep, emptied = dict.fromkeys(combined, 0), dict.fromkeys(combined, 0)
        for name, (size, as_zeros) in self._sleeper.asleep.bytes_by_role().items():
            asleep[name], emptied[name] = size, as_zeros
        outside: dict[str, dict[str, int]] = {}
        for part in self._worker_context.parts.values():
            for name, sizes in part.external_bytes().items():
                outside.setdefault(name, {}).update(sizes)
        return Shares(owned, shared, asleep, emptied, outside)


def _describe_parts(role: str, parts: Mapping[str, int]) -> str:
    order = [*(purpose.word for purpose in Purpose), "asleep", _CHILDREN]
    kinds = ", ".join(f"{kind} {format_size(parts[kind])}" for kind in order if kind in parts)
    return f"{role or 'functions'} {format_size(sum(parts.values()))} ({kinds})"


def _movable_bytes(parts: Mapping[str, int]) -> int:
    """Return the number of a role's bytes that a sleep could move."""
    return sum(parts.values()) - parts.get(Purpose.RESIDENTS.word, 0) - parts.get(_CHILDREN, 0)


def _split_shares(
    held: Mapping[str, Holdings], absent: Collection[int]
) -> tuple[dict[str, dict[tuple[str, str], int]], dict[str, int]]:
    """Return each role's own bytes by kind and device, and how many bytes of each role count for another role.

    Memory that several roles hold counts once, under its first kind and for the first role that holds it as that kind.
    Storages at the addresses `absent` sleep in place and count as 0 bytes.
    """
    owners: dict[str, dict[int, str]] = {}
    owned: dict[str, dict[tuple[str, str], int]] = {role: {} for role in held}
    shared: dict[str, dict[tuple[str, int], int]] = {role: {} for role in held}
    counted, without_memory = _count_once(held), frozenset(absent)
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


def _count_once(held: Mapping[str, Holdings]) -> dict[int, int]:
    """Return the sizes of host storages by address, with overlapping bytes counted once; {} if none can overlap."""
    storages = [pieces for holdings in held.values() for pieces in holdings.values()]
    if not any(pieces.has_arrays for pieces in storages):
        return {}
    whole = Storages()
    for pieces in storages:
        whole.add_storages(pieces)
    counted: dict[int, int] = {}
    end = 0
    for start, size in sorted(whole.get("cpu", {}).items()):
        counted[start] = max(0, start + size - max(start, end))
        end = max(end, start + size)
    return counted


def _read_gpu(device: str, in_process: bool = False, parts: Iterable[WorkerFeature] = ()) -> dict[str, int] | None:
    module = in_use(device)
    if module is None:
        return None
    with beside_captures(device):
        free, total = module.mem_get_info(device)
    without_memory, of_tensors = count_absent(device)
    sizes = {"used": total - free, "total": total}
    with contextlib.suppress(RuntimeError):  # An allocator that replaces torch's may have no statistics.
        sizes["allocated"] = module.memory_allocated(device) - of_tensors
        sizes["reserved"] = module.memory_reserved(device) - without_memory
    if in_process:  # The figures below are of the whole process, which has all slots.
        return sizes
    with INSPECTION_LOCK:
        for part in parts:
            sizes.update(part.device_bytes())
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
        self._request = threading.Event()
        self._request.set()
        self._leaves: Mapping[str, list[weakref.ref[Any]]] | None = None
        self._gradients: Mapping[str, Storages] = {}

    def by_role(self, leaves: Mapping[str, list[weakref.ref[Any]]]) -> Mapping[str, Storages]:
        """Return the gradients by role. If the lane doesn't answer in time, return the last known gradients."""
        with self._lock:
            request = self._request
            if request.is_set():
                request = self._request = threading.Event()
                self._leaves = leaves
                self._worker_context.lane.run_action(partial(self._collect, request))
        request.wait(_WITHIN_S)
        self._leaves = None  # Drop the list, because a long call may replace the tensors before the inspection runs.
        return self._gradients

    @property
    def is_due(self) -> bool:
        """Whether a queued inspection of gradients is still pending."""
        return not self._request.is_set()

    def on_moved(self, role: str) -> None:
        """Record a role's gradients again after a sleep or wake. Called on the lane."""
        if role in self._gradients:
            self._gradients = {
                **{name: gradients for name, gradients in self._gradients.items() if name != role},
                **self._find([role]),
            }

    def _collect(self, asked: threading.Event) -> None:
        self._gradients = self._find(list(get_roles_by_name(self._worker_context)), self._leaves)
        asked.set()

    def _find(
        self, names: Iterable[str], leaves: Mapping[str, list[weakref.ref[Any]]] | None = None
    ) -> dict[str, Storages]:
        gradients_by_role: dict[str, Storages] = {}
        for name in names if leaves is None else leaves:
            with contextlib.suppress(Exception):  # Inspections search the roles, too, and report such an error.
                if leaves is None:
                    tensors = search(
                        get_roles_by_name(self._worker_context)[name].instance,
                        apart=list_excluded_objects(self._worker_context, name),
                    ).leaf_tensors
                else:
                    tensors = [tensor for ref in leaves[name] if (tensor := ref()) is not None]
                gradients = Storages()
                gradients.add_all(list_gradients(tensors))
                gradients_by_role[name] = gradients
        return gradients_by_role

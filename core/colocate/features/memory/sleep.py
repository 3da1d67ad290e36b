"""Sleep and wake: a role's tensors are moved from the device to host memory, or from host memory to a file.

Either all ranks of a role move memory, or none. Each rank does the steps that may fail, then all ranks meet at the
driver, and the move becomes final only if all are ready. Only torch's own tensors move. Memory that others use stays,
and so does memory that can't be freed. `offload.py` makes the copies.
"""

from __future__ import annotations

import bisect
import errno
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs

from colocate._protocol import questions
from colocate._protocol.consequence import Consequence, RetryCall
from colocate._protocol.ledger import TAGS, Purpose
from colocate._role.context import running_call
from colocate._role.method_spec import MethodSpec
from colocate._system.imported import find_imported
from colocate._system.jobs import format_error, get_message
from colocate._system.libc import trim
from colocate._system.numbers import format_size
from colocate._system.room import read_free_memory
from colocate._system.tracebacks import format_exception, format_user_frames
from colocate.errors import ColocateError, ConfigError, SleepingError
from colocate.features.memory.offload import HOST, Key, Offload, device_of
from colocate.worker.context import WorkerContext, get_roles_by_name, list_excluded_objects
from colocate.worker.holdings import (
    Holdings,
    Objects,
    Storages,
    WeakStorage,
    find_holdings,
    find_resident_holdings,
    list_gradients,
    search,
)
from colocate.worker.serving.failure import is_out_of_memory
from colocate.worker.serving.role_instance import RoleInstance

_SMALL = 4096  # Host storages with fewer bytes stay awake if the role is on a GPU.
_PINNED = "pinned: the device uses it by itself"
_FOREIGN = "of an array, a file or another library"
_SHARED = "shared with other processes"
_OF_A_GRAPH = "of a CUDA graph, which writes there"
_AWAKE = "awake before that, too"
_TAG_OF = {purpose: tag for tag, purposes in TAGS.items() for purpose in purposes}
_ALL = tuple(TAGS)
_NO_ROOM = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

RetainedPieces: TypeAlias = Mapping[str, Mapping[Key, tuple[int, str, WeakStorage | None]]]
"""Memory that was to sleep and stays awake, by tag and key: size, reason, and a weak reference to the storage."""


def is_lack_of_room(error: BaseException) -> bool:
    """Return whether an error means that memory or disk space ran out."""
    return isinstance(error, MemoryError) or getattr(error, "errno", 0) in _NO_ROOM or is_out_of_memory(error)


def explain_error(error: Exception) -> tuple[str, str | None]:
    """Return why memory couldn't move, and the traceback, which is None for expected errors outside role code."""
    if isinstance(error, ColocateError):
        cause = error.__cause__ or error
        return error.message, format_exception(cause, whole=False) if format_user_frames(cause) else None
    if isinstance(error, (OSError, MemoryError, ValueError)) and not format_user_frames(error):
        return get_message(error) or format_error(error), None
    return format_error(error), format_exception(error, whole=False)


# -- plans


@attrs.frozen
class EvictionPlan:
    """The plan for a role's sleep: the memory that moves, and the memory that stays.

    Attributes:
        by_tag: All memory under the tags of the sleep, by tag.
        tags: The tags that had no sleeping memory before.
        pieces: The sizes of the storages that move.
        storages: The storages that are copied.
        emptied: The storages with discarded contents, also sleeping ones; a wake fills these with zeros.
        to_host: Bytes that move from the device to the host.
        retained: The storages that should have slept but stay awake.
    """

    by_tag: Mapping[str, Objects]
    tags: Sequence[str]
    pieces: Mapping[Key, int]
    storages: Mapping[Key, Any]
    emptied: Mapping[Key, Any]
    to_host: int
    retained: RetainedPieces

    @property
    def size(self) -> int:
        """The number of bytes that the sleep moves."""
        return sum(self.pieces.values())


@attrs.frozen
class RestorePlan:
    """The plan for a role's wake: the memory that is restored.

    Attributes:
        by_tag: All memory under the tags, by tag.
        tags: The tags that wake.
        pieces: The sizes of the storages that are restored.
        emptied: The storages that are filled with zeros.
        on_host: Bytes that are restored on the host.
        on_device: Bytes that are restored on the slot's device.
        anew: Bytes of host memory that are filled with zeros, because there is no copy.
        retained: The storages under the same tags that stayed awake, as in `EvictionPlan`.
    """

    by_tag: Mapping[str, Objects]
    tags: Sequence[str]
    pieces: Mapping[Key, int]
    emptied: Collection[Key]
    on_host: int
    on_device: int
    anew: int
    retained: RetainedPieces

    @property
    def size(self) -> int:
        """The number of bytes that the wake restores."""
        return sum(self.pieces.values())


def plan_eviction(
    by_tag: Mapping[str, Objects],
    away: Collection[Key],
    users: Mapping[str, Collection[Key]],
    immovable: Mapping[Key, str],
    lost: Collection[Key],
    device: str,
    asleep: Collection[str] = (),
) -> EvictionPlan:
    """Return the plan for a sleep: the storages that move, and the reasons why other storages stay.

    Args:
        by_tag: The memory that is to sleep, by tag; each storage once.
        away: The storages that sleep already.
        users: Storages in use by others, by the name of the user.
        immovable: The reasons why storages can't or mustn't lose their memory.
        lost: Storages with contents to discard.
        device: The slot's device, as named by torch.
        asleep: The tags with sleeping memory.
    """
    retained: dict[str, dict[Key, tuple[int, str, WeakStorage | None]]] = {tag: {} for tag in by_tag}
    pieces: dict[Key, int] = {}
    storages: dict[Key, Any] = {}
    emptied: dict[Key, Any] = {}
    to_host = 0
    for tag, objects in by_tag.items():
        for place, sizes in objects.items():
            for key, size in sizes.items():
                storage = objects.storages.get(key)
                if key in away:
                    if key in lost:
                        emptied[key] = storage
                    continue
                if not size or (place == HOST != device and size < _SMALL):
                    continue  # Tiny storages, such as an optimizer's step counters, aren't worth a file.
                using = [user for user, keys in users.items() if key in keys]
                if using or key in immovable or storage is None or place not in {HOST, device}:
                    why = f"on {place}" if place not in {HOST, device} else immovable.get(key, _FOREIGN)
                    why = f"used by {' and '.join(using)}" if using else why
                    retained[tag][key] = size, why, None if storage is None else WeakStorage(storage)
                    continue
                pieces[key] = size
                if key in lost:
                    emptied[key] = storage
                else:
                    storages[key] = storage
                    to_host += size if place != HOST else 0
    new = [tag for tag in by_tag if tag not in asleep]
    return EvictionPlan(by_tag, new, pieces, storages, emptied, to_host, retained)


def group_by_tag(found: Mapping[Purpose, Storages]) -> dict[str, Objects]:
    """Group a role's holdings by tag. A storage with several purposes counts for the first one in `Purpose`."""
    by_tag = {tag: Objects() for tag in TAGS}
    assigned: set[Key] = set()
    for purpose in filter(_TAG_OF.__contains__, Purpose):
        pieces, objects = found.get(purpose), by_tag[_TAG_OF[purpose]]
        if not isinstance(pieces, Objects):
            continue
        keys = {key for sizes in pieces.values() for key in sizes} - assigned
        for place, sizes in pieces.items():
            objects.setdefault(place, {}).update({key: size for key, size in sizes.items() if key in keys})
        objects.storages.update({key: value for key, value in pieces.storages.items() if key in keys})
        objects.tensors.update({key: value for key, value in pieces.tensors.items() if key in keys})
        objects.pinned |= pieces.pinned & keys
        assigned |= keys
    return by_tag


def find_discardable(
    found: Mapping[Purpose, Storages], discard: Collection[str], others: Iterable[Mapping[str, Mapping[Key, int]]]
) -> set[Key]:
    """Return the storages that a role holds only under tags to discard, and that no other holder uses.

    Trained tensors and tensors in autograd graphs are excluded, because torch may keep these, too. Indices of sparse
    and jagged tensors are excluded, because zeros would make the tensors invalid.

    Args:
        found: The role's holdings, asleep or not.
        discard: The tags to discard.
        others: The holdings of all other holders, asleep or not.
    """
    purposes = {purpose for tag in discard for purpose in TAGS[tag]}
    discarded = [objects for purpose, objects in found.items() if purpose in purposes and isinstance(objects, Objects)]
    needed = _collect_keys([*others, *(pieces for purpose, pieces in found.items() if purpose not in purposes)])
    needed = needed.union(*(pieces.trained | pieces.indices for pieces in discarded))
    return {key for pieces in discarded for key in pieces.storages} - needed


def _collect_keys(found: Iterable[Mapping[str, Mapping[Key, int]]]) -> set[Key]:
    return {key for pieces in found for sizes in list(pieces.values()) for key in list(sizes)}


# -- sleeping memory


class SleepingMemory:
    """The record of the sleeping memory of a worker's roles. The lane changes the record, and any thread may read it.

    Attributes:
        roles: The sleeping storages by role and tag, also those that other roles hold too.
        offloaded: The sizes of storages without memory, by key.
        emptied: The storages of `offloaded` without a copy; a wake fills these with zeros.
        reasons: The reason of the last failed wake, by role.
    """

    def __init__(self, device: str, offload: Offload) -> None:
        """Create an empty record for the slot's `device`. `offload` moves the memory."""
        self._device = device
        self._offload = offload
        self.roles: dict[str, dict[str, Objects]] = {}
        self._retained: dict[str, RetainedPieces] = {}
        self.offloaded: dict[Key, int] = {}
        self.emptied: set[Key] = set()
        self.reasons: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self.roles)

    def sleeping_tags(self, role: str | None) -> Sequence[str]:
        """Return the tags under which a role has sleeping memory."""
        return () if role is None else tuple(self.roles.get(role, ()))

    def awake_bytes(self, role: str, tags: Collection[str] | None = None) -> dict[str, int]:
        """Return how many bytes of a sleeping role stayed awake, by reason, with the largest number first.

        The role's last sleep decides. Storages that were collected or slept with another role since don't count.
        """
        sizes_by_reason: dict[str, int] = {}
        by_tag = self.roles.get(role, {})
        for tag, pieces in self._retained.get(role, {}).items():
            if tag not in by_tag or (tags is not None and tag not in tags):
                continue
            present = _collect_keys([by_tag[tag]])
            for key, (size, why, reference) in pieces.items():
                if (
                    key in present
                    and key not in self.offloaded
                    and not (reference is not None and reference.is_expired())
                ):
                    sizes_by_reason[why] = sizes_by_reason.get(why, 0) + size
        return dict(sorted(sizes_by_reason.items(), key=lambda each: -each[1]))

    def bytes_by_role(self) -> dict[str, tuple[int, int]]:
        """Return each role's sleeping bytes, and how many of these have no copy. Each storage counts once."""
        counted: set[Key] = set()
        result: dict[str, tuple[int, int]] = {}
        for role, by_tag in list(self.roles.items()):
            keys = {
                key for pieces in list(by_tag.values()) for key in pieces.storages if not _is_collected(key)
            } - counted
            sizes = {key: self.offloaded.get(key, 0) for key in keys}
            result[role] = sum(sizes.values()), sum(size for key, size in sizes.items() if key in self.emptied)
            counted |= keys
        return result

    def fixed_addresses(self) -> set[int]:
        """Return the addresses of the sleeping storages that keep their addresses during a sleep."""
        storages_by_role = [pieces.storages for by_tag in list(self.roles.values()) for pieces in list(by_tag.values())]
        return {storage.data_ptr() for storages in storages_by_role for storage in storages.values()} - {0}

    def plan_restore(self, name: str, tags: Iterable[str]) -> RestorePlan:
        """Return the plan for a wake of these tags of a role. All tags must be asleep."""
        self.drop_collected()
        by_tag = {tag: self.roles[name][tag] for tag in tags}
        places = {key: place for objects in by_tag.values() for place, sizes in objects.items() for key in sizes}
        pieces = {key: self.offloaded[key] for key in places if key in self.offloaded}
        emptied = pieces.keys() & self.emptied
        on_host = {key for key in pieces if places[key] == HOST}
        return RestorePlan(
            by_tag,
            list(by_tag),
            pieces,
            emptied,
            sum(pieces[key] for key in on_host),
            sum(size for key, size in pieces.items() if places[key] == self._device),
            sum(pieces[key] for key in emptied & on_host),
            {tag: retained for tag, retained in self._retained.get(name, {}).items() if tag in by_tag},
        )

    def add_evicted(self, name: str, moved: EvictionPlan | RestorePlan) -> None:
        """Record the memory of a role that was put to sleep."""
        self.offloaded.update(moved.pieces)
        self.emptied.update(moved.emptied)
        asleep = self.roles.setdefault(name, {})
        for tag, pieces in moved.by_tag.items():
            joined = Objects()  # Build a new object, because other threads may be reading the old one.
            for objects in (asleep.get(tag), pieces):
                if objects is not None:
                    joined.add_storages(objects)
                    # Refer to sleeping storages only, so that roles can free all other storages.
                    joined.storages |= {
                        key: storage for key, storage in objects.storages.items() if key in self.offloaded
                    }
            asleep[tag] = joined
        # Build a new mapping, because other threads may be reading the old one.
        self._retained[name] = {**self._retained.get(name, {}), **moved.retained}

    def remove_restored(self, name: str, moved: RestorePlan | EvictionPlan) -> None:
        """Record that a role's memory is awake again."""
        for key in moved.pieces:
            self.offloaded.pop(key, None)
        self.emptied -= moved.pieces.keys()
        self.reasons.pop(name, None)
        asleep = self.roles[name]
        for tag in moved.tags:
            del asleep[tag]
        self._retained[name] = {tag: pieces for tag, pieces in self._retained.get(name, {}).items() if tag in asleep}
        if not asleep:
            del self.roles[name], self._retained[name]

    def add_unrestored(self, name: str, tags: Collection[str], why: str) -> None:
        """Record tags as asleep after the role's `wake` hook has failed, although all storages were restored."""
        self.roles.setdefault(name, {}).update({tag: Objects() for tag in tags})
        self.reasons[name] = why

    def drop_collected(self) -> None:
        """Drop the records of sleeping storages that no role refers to any more."""
        if not (collected := {key for key in self.offloaded if _is_collected(key)}):
            return
        for by_tag in self.roles.values():
            for pieces in by_tag.values():
                pieces.storages = {key: storage for key, storage in pieces.storages.items() if key not in collected}
        for key in collected:
            del self.offloaded[key]
        self.emptied -= collected
        self._offload.forget_copies(collected)


def _is_collected(key: Key) -> bool:
    """Return whether only colocate's own Python object still refers to a sleeping storage."""
    uses: int = find_imported("torch")._C._storage_Use_Count(key)
    return uses == 1


class Ranges:
    """A set of memory ranges, in which overlapping ranges are merged."""

    def __init__(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Merge `pieces`, which are pairs of address and size and may overlap."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, size in sorted(pieces):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], start + size)
            elif size:
                self._starts.append(start)
                self._stops.append(start + size)

    def overlaps(self, start: int, size: int) -> bool:
        """Return whether a piece of memory overlaps one of the ranges."""
        # Find the last range that starts before the piece ends.
        place = bisect.bisect_left(self._starts, start + size) - 1
        return place >= 0 and self._stops[place] > start


# -- sleep and wake


@attrs.frozen
class Outcome:
    """The outcome of a sleep or wake on one rank.

    Attributes:
        refusal: The reason why a rank refused, so that no rank moved memory; None on success.
        refused_here: Whether this rank refused.
        fits: Whether there was room on this rank.
        nbytes: Bytes moved on this rank.
        residue: The damage to the role on this rank after a refusal, in words; None for none.
        trace: The traceback of an error of the role's own hook on this rank.
    """

    refusal: str | None = None
    refused_here: bool = False
    fits: bool = True
    nbytes: int = 0
    residue: str | None = None
    trace: str | None = None


class Sleeper:
    """Puts roles of a worker to sleep, and wakes roles. Both happen on the lane.

    Attributes:
        asleep: The sleeping memory.
        offload: The copies.
        spill_dir: The folder for the host's sleeping memory; None for any with room.
        read_free_memory: Returns the free bytes of the host.
        refuse_more: Raises if a budget has no room for so many more bytes of a sleeping or waking role, on the device
            or host.
    """

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self.offload = Offload(worker_context.boot.device, lambda: self.read_free_memory(), lambda: self.spill_dir)
        self.asleep = SleepingMemory(worker_context.boot.device, self.offload)
        self.spill_dir: str | None = None
        self.read_free_memory: Callable[[], int] = read_free_memory
        self.refuse_more: Callable[[str, int, bool, bool], None] = lambda role, nbytes, device, wakes: None

    def prepare_offload(self, in_turns: bool) -> None:
        """Open the file for sleeping memory before roles are constructed, so that errors are reported early."""
        if self.spill_dir is not None or (in_turns and self._worker_context.boot.device == "cpu"):
            try:
                self.offload.spill_file()
            except ValueError as error:
                where = "" if self.spill_dir is None else f"spill_dir={self.spill_dir!r}: "
                raise ConfigError(f"{where}{error} (on node {self._worker_context.boot.node})") from None

    def check_awake(self, role: RoleInstance, spec: MethodSpec) -> None:
        """Raise a `SleepingError` if a method needs sleeping memory of the role or of a sibling stored in the role."""
        if not self.asleep:
            return
        asleep = [tag for tag in self.asleep.sleeping_tags(role.name) if spec.awake is None or tag in spec.awake]
        if asleep:
            why = self.asleep.reasons.get(role.name or "")
            how = f", which could not be woken: {why}" if why else f": call group.wake({role.name!r}) first"
            raise SleepingError(f"{role.label(spec.name)} needs sleeping memory of its role ({', '.join(asleep)}){how}")
        if spec.awake == () or role.name is None:  # Functions, which have no role name, store no siblings.
            return
        for name in sorted(role.ctx._asked_siblings & self._worker_context.roles.keys()):
            asleep = list(self.asleep.sleeping_tags(name))
            if asleep and search(role.instance, apart=[self._worker_context.roles[name].instance]).has_met_excluded:
                raise SleepingError(
                    f"{role.label(spec.name)} might use role {name!r}, whose memory sleeps ({', '.join(asleep)}), "
                    f"because role {role.name!r} has stored an object from ctx.sibling(). Call group.wake({name!r}) "
                    "first; or don't store the object, and call ctx.sibling() in the methods that use it"
                )

    def check_sibling_awake(self, role: str, tags: Collection[str] = _ALL) -> None:
        """Raise a `SleepingError` if a requested role has sleeping memory under one of these tags."""
        if asleep := [tag for tag in self.asleep.sleeping_tags(role) if tag in tags]:
            raise SleepingError(
                f"memory of role {role!r} sleeps ({', '.join(asleep)}): wake it with group.wake({role!r}), or call one "
                "of its methods, before something in its workers uses it"
            )

    def sleep_on_all(
        self,
        name: str,
        tags: Sequence[str],
        discard: Collection[str],
        members: int,
    ) -> Outcome:
        """Put memory of a role to sleep if all ranks can. Otherwise undo the sleep on this rank."""
        role = self._worker_context.roles.get(name)
        if role is None:
            return Outcome(self._collect_refusals(members, None))
        ordered = [tag for tag in TAGS if tag in tags]
        new = [tag for tag in ordered if tag not in self.asleep.sleeping_tags(name)]
        plans: list[EvictionPlan] = []

        def begin() -> Callable[[], int]:
            before = sum(role.get_managed_bytes().values())
            going, copies = self._copy_out(name, role, ordered, discard)
            plans.append(going)
            managed_bytes = before - sum(role.get_managed_bytes().values())
            return lambda: self._release_copied(going, copies) + managed_bytes

        outcome = self._all_or_none(role, members, begin, lambda: self._undo_hook(role, new))
        if outcome.refusal is None:
            self.asleep.add_evicted(name, plans[0])
            trim()  # Without this call, `malloc` would keep some of the freed memory.
        elif not set(new).isdisjoint(self.asleep.sleeping_tags(name)):
            raised = f"wake() on {_rank_text(role)} has raised {self.asleep.reasons[name]}"
            return attrs.evolve(outcome, residue=f"{raised}, and is called again when the role is woken")
        return outcome

    def wake_on_all(self, name: str, tags: Sequence[str], members: int) -> Outcome:
        """Wake memory of a role if all ranks can. Otherwise undo the wake on this rank."""
        role = self._worker_context.roles.get(name)
        asleep = [tag for tag in self.asleep.sleeping_tags(name) if tag in tags]
        if role is None or not asleep:
            return Outcome(self._collect_refusals(members, None))
        coming = self.asleep.plan_restore(name, asleep)
        free = self._find_free(coming.on_host)

        def begin() -> Callable[[], int]:
            self.refuse_more(name, coming.on_device, True, True)
            self.refuse_more(name, coming.anew, False, True)
            if coming.on_host > free:
                raise MemoryError(f"{format_size(coming.on_host)} are needed, and {format_size(free)} are free")
            self.offload.restore_storages(coming.pieces)
            return lambda: coming.size

        outcome = self._all_or_none(role, members, begin, lambda: self.offload.undo_restore(coming.pieces))
        if outcome.refusal is None:
            before = sum(role.get_managed_bytes().values())
            self._finish_wake(role, coming)
            outcome = attrs.evolve(outcome, nbytes=outcome.nbytes + sum(role.get_managed_bytes().values()) - before)
        else:
            self.asleep.reasons[name] = outcome.refusal
        return outcome

    def sleep_alone(self, name: str, tags: Sequence[str] = _ALL, only: RestorePlan | None = None) -> int:
        """Put a role to sleep on this rank only, and return the number of moved bytes. Before its next use, wake it.

        The number includes bytes that the device keeps. `only` is the plan of an earlier wake; no other memory sleeps.
        """
        role = self._worker_context.roles[name]
        new = [tag for tag in tags if tag not in self.asleep.sleeping_tags(name)]
        going, copies = self._copy_out(name, role, tags, only=only)
        try:
            self._release_copied(going, copies)
        except BaseException as error:
            self._undo_hook(role, new, error)
            raise
        self.asleep.add_evicted(name, going)
        if going.to_host < going.size or (new and role.find_hook("sleep") is not None):
            trim()
        return going.size

    def wake_alone(self, role: RoleInstance, tags: Sequence[str] = _ALL) -> int:
        """Wake memory of a role on this rank only, and return the number of restored bytes."""
        asleep = [tag for tag in self.asleep.sleeping_tags(role.name) if tag in tags]
        if not asleep:
            return 0
        assert role.name is not None
        coming = self.asleep.plan_restore(role.name, asleep)
        self._find_free(coming.on_host)
        self.offload.restore_storages(coming.pieces)
        self._finish_wake(role, coming)
        return coming.size

    def wake_size(self, name: str, tags: Sequence[str]) -> int:
        """Return the number of bytes of device memory that are needed to wake a role's tags."""
        asleep = [tag for tag in self.asleep.sleeping_tags(name) if tag in tags]
        return self.asleep.plan_restore(name, asleep).on_device if asleep else 0

    def plan_sleep(
        self, name: str, tags: Sequence[str], discard: Collection[str] = (), only: RestorePlan | None = None
    ) -> EvictionPlan:
        """Return the plan for a role's sleep.

        Args:
            name: The role.
            tags: The tags to put to sleep.
            discard: Tags with contents to discard, also of sleeping memory.
            only: The plan of an earlier wake; no other memory may sleep. None for all memory.

        Raises:
            MemoryBudgetError: The destination has no room.
            ColocateError: The search of a role's holdings failed or is incomplete.
        """
        self.asleep.drop_collected()
        worker_context, asleep = self._worker_context, self.asleep.sleeping_tags(name)
        holdings = _find_holdings(
            worker_context, name, partial(Objects, worker_context.boot.device), "cache" in tags or bool(discard)
        )
        every = group_by_tag(holdings)
        by_tag = {tag: every[tag] for tag in tags}
        # `users` has the awake storages of other holders, and `other_holdings` all storages of other holders.
        users: dict[str, Collection[Key]] = {}
        other_holdings: list[Mapping[str, Mapping[Key, int]]] = []
        for other in [item for item in get_roles_by_name(worker_context) if item != name]:
            holdings_of_other = _find_holdings(worker_context, other)
            other_holdings += holdings_of_other.values()
            users[f"role {other!r}"] = _collect_keys(
                pieces
                for tag, pieces in group_by_tag(holdings_of_other).items()
                if tag not in self.asleep.sleeping_tags(other)
            )
        lying, leaves = find_resident_holdings(
            [value for _, value in worker_context.store.list_values()], list_excluded_objects(worker_context), Objects
        )
        lying[Purpose.GRADIENTS].add_all(list_gradients(leaves))
        other_holdings += lying.values()
        users["residents"] = _collect_keys(lying.values())
        for tag in TAGS:
            if tag not in tags and tag not in asleep:
                users[f"its {tag}"] = _collect_keys([every[tag]])
        noted = [item for item in (*holdings.values(), *other_holdings) if isinstance(item, Objects)]
        why = self._find_immovable(by_tag.values(), noted)
        if only is not None:
            before = {key: because for pieces in only.retained.values() for key, (_, because, _) in pieces.items()}
            why = {key: before.get(key, _AWAKE) for key in _collect_keys(by_tag.values()) - only.pieces.keys()} | why
        lost = find_discardable(holdings, discard, other_holdings) if discard else set[Key]()
        going = plan_eviction(by_tag, self.asleep.offloaded, users, why, lost, worker_context.boot.device, asleep)
        self.refuse_more(name, going.to_host, False, False)
        return going

    def _find_immovable(self, found: Collection[Objects], noted: Collection[Objects]) -> dict[Key, str]:
        """Return the reasons why storages in `found` mustn't be freed, by key. `noted` has the worker's holdings."""
        worker_context, can_take = self._worker_context, self.offload.can_release

        def there(among: Iterable[Objects]) -> Iterable[tuple[Key, Any]]:
            storages = {key: storage for item in among for key, storage in item.storages.items()}
            return [(key, storage) for key, storage in storages.items() if key not in self.asleep.offloaded]

        graphs = any(item.parts.get("memory") for item in list(worker_context.roles.values()))
        why = {key: _PINNED for item in found for key in item.pinned}
        # Compare address ranges, because another library may use a part of a torch storage.
        arrays = [piece for item in noted for piece in item.arrays.items()]
        fixed = [(item.data_ptr(), item.nbytes()) for _, item in there(noted) if not can_take(item)]
        foreign = Ranges([*arrays, *fixed])
        for key, storage in there(found):
            on_host = device_of(storage) == HOST
            if not can_take(storage) or foreign.overlaps(storage.data_ptr(), storage.nbytes()):
                why[key] = _SHARED if on_host and storage.is_shared() else _FOREIGN
            elif (
                graphs
                and not on_host
                and not self.offload.keeps_address(storage)
                and worker_context.device.is_private(storage.data_ptr())
            ):
                why[key] = _OF_A_GRAPH  # A replay of the CUDA graph would write to the old address.
        return why

    def _find_free(self, wanted: int) -> int:
        """Return the host's free bytes. If these are fewer than `wanted`, first make `malloc` release unused memory."""
        if (free := self.read_free_memory()) >= wanted:
            return free
        trim()
        return self.read_free_memory()

    def _all_or_none(
        self, role: RoleInstance, members: int, begin: Callable[[], Callable[[], int]], undo: Callable[[], object]
    ) -> Outcome:
        """Run `begin` on this rank. If all ranks succeed, run the function that `begin` returned, otherwise `undo`."""
        refusal: str | None = None
        end: Callable[[], int] | None = None
        fits, moved, trace = True, 0, None
        try:
            end = begin()
        except Consequence as error:  # Another rank failed while this rank was waiting.
            raise RetryCall(error.message) from error
        except Exception as error:  # An error of the role's own hook is a refusal, too.
            fits = not is_lack_of_room(error)
            why, trace = explain_error(error)
            refusal = f"{_rank_text(role)}: {why}"
        try:
            refusal = self._collect_refusals(members, refusal)
        except RetryCall:
            if end is not None:
                undo()
            raise
        if refusal is None and end is not None:
            moved = end()
        elif end is not None:
            undo()
        return Outcome(refusal, end is None, fits, moved, trace=trace)

    def _collect_refusals(self, members: int, refusal: str | None) -> str | None:
        """Wait for the other ranks, and return the first refusal, or None if all ranks are ready."""
        call = running_call.get()
        assert call is not None
        try:
            rendezvous_key = f"sleep {call.seq} {self._worker_context.lane.last_resumed}"
            self._worker_context.ask_driver(questions.JoinRendezvous(rendezvous_key, members, None, refusal))
        except Consequence as error:
            raise RetryCall(error.message) from error
        except ColocateError as error:
            return error.message
        return None

    def _copy_out(
        self,
        name: str,
        role: RoleInstance,
        tags: Sequence[str],
        discard: Collection[str] = (),
        only: RestorePlan | None = None,
    ) -> tuple[EvictionPlan, Mapping[Key, Any]]:
        """Copy the memory of a role that goes to sleep, and return the plan and the copies."""
        for part in self._worker_context.parts.values():
            part.wait_for_writers()
        new = [tag for tag in tags if tag not in self.asleep.sleeping_tags(name)]
        if new:  # Call the hook before the plan is made, because the hook may free memory.
            role.call_hook("sleep", tuple(new))
        try:
            going = self.plan_sleep(name, tags, discard, only)
            return going, self.offload.copy_out(going.storages, going.emptied)
        except BaseException as error:
            self._undo_hook(role, new, error)
            raise

    def _release_copied(self, going: EvictionPlan, copies: Mapping[Key, Any]) -> int:
        """Free the memory of copied storages, and return the number of freed bytes."""
        retained = self.offload.offload_copies(copies)
        # Mark emptied tensors as modified, so that a backward pass with such a saved tensor raises an error.
        for pieces in going.by_tag.values():
            for reference in (tensor_ref for key in going.emptied for tensor_ref in pieces.tensors.get(key, ())):
                tensor = reference()
                if tensor is not None and not tensor.is_inference():
                    find_imported("torch").autograd.graph.increment_version(tensor)
        return going.size - retained

    def _undo_hook(self, role: RoleInstance, tags: Sequence[str], error: BaseException | None = None) -> None:
        """Call the role's `wake` hook after an abandoned sleep. If the hook raises, add a note to `error`."""
        try:
            self._call_wake_hook(role, tags)
        except Exception as second:
            if error is not None:
                error.add_note(f"then its wake() raised {format_error(second)}")

    def _finish_wake(self, role: RoleInstance, coming: RestorePlan) -> None:
        """Complete a wake: drop the copies, and call the role's `wake` hook."""
        assert role.name is not None
        self.offload.forget_copies(coming.pieces)
        self.asleep.remove_restored(role.name, coming)
        self._call_wake_hook(role, coming.tags)

    def _call_wake_hook(self, role: RoleInstance, tags: Sequence[str]) -> None:
        """Call the role's `wake` hook. If the hook raises, mark the tags as asleep, so that the next wake retries."""
        try:
            if tags:
                role.call_hook("wake", tuple(tags))
        except BaseException as error:
            assert role.name is not None
            self.asleep.add_unrestored(role.name, tags, format_error(error))
            raise


def _find_holdings(
    worker_context: WorkerContext, name: str, storages: Callable[[], Objects] = Objects, with_declared: bool = True
) -> Holdings:
    """Return the storages that a role holds.

    Raises:
        ColocateError: `device_state` raised, or the role holds too many objects to search.
    """
    role = worker_context.roles[name]
    try:
        declared = role.list_declared() if with_declared else ()
    except Exception as error:
        raise ColocateError(f"device_state() of role {name!r} has raised {format_error(error)}") from error
    holdings, complete = find_holdings(role.instance, declared, list_excluded_objects(worker_context, name), storages)
    if not complete:
        raise ColocateError(
            f"role {name!r} holds more objects than were looked at: what else uses the memory isn't known"
        )
    return holdings


def _rank_text(role: RoleInstance) -> str:
    return f"rank {role.ctx.rank} (node {role.ctx.node})"

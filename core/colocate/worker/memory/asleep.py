"""What of a worker's memory sleeps, what more of a role can go, and what comes when it wakes: found and noted here.

Only torch's own tensors go. What others use stays, and so does what can't lose its memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs

from colocate._protocol.ledger import TAGS, Purpose
from colocate._system.imported import imported
from colocate._system.jobs import error_text
from colocate.errors import ColocateError
from colocate.worker.handed import HANDED
from colocate.worker.memory.holdings import Holdings, gradients_of, held_by, lie_in
from colocate.worker.memory.offload import HOST, Offload, place_of
from colocate.worker.memory.site import Worker
from colocate.worker.memory.storages import Objects, Storages, WeakStorage
from colocate.worker.serving.hosted import HostedRole

_SMALL = 4096  # bytes of the host's memory, of a role on a GPU
_PINNED = "pinned: the device uses it by itself"
_FOREIGN = "of an array, a file or another library"
_SHARED = "shared with other processes"
_OF_A_GRAPH = "of a CUDA graph, which writes there"
_AWAKE = "awake before that, too"
_HANDED = "handed over by reference, as slots are threads"
_STEPPED = ("grads", "optimizer")
_TAG_OF = {purpose: tag for tag, purposes in TAGS.items() for purpose in purposes}

Kept: TypeAlias = Mapping[str, Mapping[int, tuple[int, str, WeakStorage | None]]]
"""Pieces that were to sleep and are awake, by tag: their sizes, why, and what tells whether they are there."""


@attrs.frozen
class Going:
    """What of a role is to sleep, and can.

    Attributes:
        by_tag: What is to, by its tags.
        tags: Those of them of which nothing slept.
        pieces: The sizes of what goes.
        storages: What is copied elsewhere.
        trained: Those of them that training changes.
        emptied: What is let go of, also of what sleeps already: it comes back as zeros.
        to_host: The bytes of the device that go to the host.
        kept: The pieces that were to and stay.
    """

    by_tag: Mapping[str, Objects]
    tags: Sequence[str]
    pieces: Mapping[int, int]
    storages: Mapping[int, Any]
    trained: Collection[int]
    emptied: Mapping[int, Any]
    to_host: int
    kept: Kept

    @property
    def size(self) -> int:
        """The bytes that go."""
        return sum(self.pieces.values())

    def are_rewritten(self) -> None:
        """Have autograd know that what is emptied isn't what it may have saved for a backward pass."""
        for pieces in self.by_tag.values():
            for reference in (each for key in self.emptied for each in pieces.tensors.get(key, ())):
                tensor = reference()
                if tensor is not None and not tensor.is_inference():
                    imported("torch").autograd.graph.increment_version(tensor)


@attrs.frozen
class Coming:
    """What of a role is to be there again.

    Attributes:
        by_tag: What is to, by its tags.
        tags: These.
        pieces: The sizes of its pieces.
        emptied: Those that come as zeros.
        trained: Those that will have changed when they go the next time.
        on_host: What of all is the host's, in bytes.
        on_device: What comes to the slot's device.
        anew: The bytes of the host's memory that come as zeros: they haven't been anywhere.
        kept: What of the same tags is awake, as `Going` has it.
    """

    by_tag: Mapping[str, Objects]
    tags: Sequence[str]
    pieces: Mapping[int, int]
    emptied: Collection[int]
    trained: Collection[int]
    on_host: int
    on_device: int
    anew: int
    kept: Kept

    @property
    def size(self) -> int:
        """All bytes that were away."""
        return sum(self.pieces.values())


class Asleep:
    """What sleeps. It is changed on the lane, and may be read on any thread.

    Attributes:
        roles: That by role and tag, with what other roles hold too.
        away: The sizes of pieces of memory that aren't there, by what torch calls their storages.
        emptied: Those of them that are nowhere else either: they come back as zeros.
        why: What was in the way when a role was last to be woken, of those that could not be.
    """

    def __init__(self, site: Worker, offload: Offload) -> None:
        """Nothing sleeps. `site`: the worker; `offload`: how memory goes."""
        self._site = site
        self._offload = offload
        self.roles: dict[str, dict[str, Objects]] = {}
        self._kept: dict[str, Kept] = {}
        self.away: dict[int, int] = {}
        self.emptied: set[int] = set()
        self.why: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self.roles)

    def tags(self, role: str | None) -> Sequence[str]:
        """What of a role sleeps."""
        return () if role is None else tuple(self.roles.get(role, ()))

    def kept_awake(self, role: str, tags: Collection[str] | None = None) -> dict[str, int]:
        """Why memory of what sleeps of a role is awake all the same, and how many bytes, most first.

        As it was when that was put to sleep, without what is gone since, or has gone with another role.

        Args:
            role: The role.
            tags: Of what of it; None for all.
        """
        found: dict[str, int] = {}
        by_tag = self.roles.get(role, {})
        for tag, pieces in self._kept.get(role, {}).items():
            if tag not in by_tag or (tags is not None and tag not in tags):
                continue
            there = {key for sizes in list(by_tag[tag].values()) for key in list(sizes)}
            for key, (size, why, reference) in pieces.items():
                if key in there and key not in self.away and not (reference is not None and reference.expired()):
                    found[why] = found.get(why, 0) + size
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def by_role(self) -> dict[str, tuple[int, int]]:
        """Bytes that sleep, by role, and those of them that come back as zeros. Each counts once."""
        seen: set[int] = set()
        found: dict[str, tuple[int, int]] = {}
        for role, by_tag in list(self.roles.items()):
            keys = {key for pieces in list(by_tag.values()) for key in pieces.storages if not _is_gone(key)} - seen
            sizes = {key: self.away.get(key, 0) for key in keys}
            found[role] = sum(sizes.values()), sum(size for key, size in sizes.items() if key in self.emptied)
            seen |= keys
        return found

    def kept_addresses(self) -> set[int]:
        """Where storages are that sleep and keep their addresses."""
        found = [pieces.storages for by_tag in list(self.roles.values()) for pieces in list(by_tag.values())]
        return {storage.data_ptr() for storages in found for storage in storages.values()} - {0}

    def coming(self, name: str, tags: Iterable[str]) -> Coming:
        """What of a role is to be there again; all of these sleep."""
        self._forget_gone()
        by_tag = {tag: self.roles[name][tag] for tag in tags}
        places = {key: place for found in by_tag.values() for place, sizes in found.items() for key in sizes}
        pieces = {key: self.away[key] for key in places if key in self.away}
        emptied = pieces.keys() & self.emptied
        on_host = {key for key in pieces if places[key] == HOST}
        here = {key for key in pieces if places[key] == self._site.boot.device}
        kept = self._kept.get(name, {})
        return Coming(
            by_tag,
            list(by_tag),
            pieces,
            emptied,
            _trained(by_tag) & pieces.keys(),
            sum(pieces[key] for key in on_host),
            sum(pieces[key] for key in here),
            sum(pieces[key] for key in emptied & on_host),
            {tag: kept[tag] for tag in by_tag if tag in kept},
        )

    def add(self, name: str, moved: Going | Coming) -> None:
        """A role's memory sleeps, or does still."""
        self.away.update(moved.pieces)
        self.emptied |= set(moved.emptied)
        asleep = self.roles.setdefault(name, {})
        for tag, pieces in moved.by_tag.items():
            joined = Objects()  # others are reading what is there
            for each in (asleep.get(tag), pieces):
                if each is not None:
                    joined.include(each)
                    joined.trained |= each.trained
                    # The others may be let go of.
                    joined.storages |= {key: storage for key, storage in each.storages.items() if key in self.away}
            asleep[tag] = joined
        self._kept[name] = {**self._kept.get(name, {}), **moved.kept}  # others are reading this, too

    def remove(self, name: str, moved: Coming | Going) -> None:
        """It is there again, or still."""
        for key in moved.pieces:
            self.away.pop(key, None)
        self.emptied -= moved.pieces.keys()
        self.why.pop(name, None)
        asleep = self.roles[name]
        for tag in moved.tags:
            del asleep[tag]
        self._kept[name] = {tag: pieces for tag, pieces in self._kept.get(name, {}).items() if tag in asleep}
        if not asleep:
            del self.roles[name], self._kept[name]

    def add_own(self, name: str, tags: Collection[str], why: str) -> None:
        """What a role puts away by its own means isn't back, though the rest is."""
        self.roles.setdefault(name, {}).update({tag: Objects() for tag in tags})
        self.why[name] = why

    def _forget_gone(self) -> None:
        """What nobody has any more sleeps no longer."""
        if not (gone := {key for key in self.away if _is_gone(key)}):
            return
        for by_tag in self.roles.values():
            for pieces in by_tag.values():
                pieces.storages = {key: each for key, each in pieces.storages.items() if key not in gone}
        for key in gone:
            del self.away[key]
        self.emptied -= gone
        self._offload.let_go(gone)

    # -- what goes, on the lane

    def going(self, name: str, tags: Sequence[str], discard: Collection[str] = (), only: Coming | None = None) -> Going:
        """What of a role is to sleep, and can.

        Args:
            name: The role.
            tags: What of it.
            discard: Tags of which the contents are let go of; those that sleep already, too.
            only: What may go, as it had come; None for all.

        Raises:
            ColocateError: Not everything can be looked at.
        """
        self._forget_gone()
        role = self._site.roles[name]
        apart = [each.instance for each in self._site.roles.values() if each.name not in (None, name)]
        declared = _declared(role) if "cache" in tags or discard else ()
        found, complete = held_by(role.instance, declared, apart, partial(Objects, self._site.boot.device))
        _refuse_partial(name, complete)
        every = _by_tags(found)
        users, others = self._held_by_others(name)
        for tag in TAGS:
            if tag not in tags and tag not in self.tags(name):
                users[f"its {tag}"] = every[tag]
        by_tag = {tag: every[tag] for tag in tags}
        noted = [each for each in (*found.values(), *others) if isinstance(each, Objects)]
        why = self._immovable(by_tag.values(), noted)
        if only is not None:
            keys = {key for pieces in by_tag.values() for sizes in pieces.values() for key in sizes}
            before = {key: because for pieces in only.kept.values() for key, (_, because, _) in pieces.items()}
            why = {key: before.get(key, _AWAKE) for key in keys.difference(only.pieces)} | why
        # Threads hand over by reference: a cache may be the driver's tensor, and a gradient what the driver has got.
        lost = _unneeded(found, discard, others) if discard and not self._site.in_process else Objects()
        return self._plan(by_tag, [tag for tag in tags if tag not in self.tags(name)], users, why, lost)

    def _plan(
        self,
        by_tag: Mapping[str, Objects],
        new: Sequence[str],
        users: Mapping[str, Storages],
        immovable: Mapping[int, str],
        lost: Objects,
    ) -> Going:
        device = self._site.boot.device
        used = {key for pieces in users.values() for sizes in pieces.values() for key in sizes}
        kept: dict[str, dict[int, tuple[int, str, WeakStorage | None]]] = {tag: {} for tag in by_tag}
        pieces: dict[int, int] = {}
        storages: dict[int, Any] = {}
        to_host = 0
        for tag, found in by_tag.items():
            for place, sizes in found.items():
                for key, size in sizes.items():
                    storage = found.storages.get(key)
                    if key in self.away or key in pieces or not size:
                        continue
                    if place == HOST != device and size < _SMALL:  # an optimizer's step, say: no file is worth that
                        continue
                    if key in used or key in immovable or storage is None or place not in {HOST, device}:
                        reference = None if storage is None else WeakStorage(storage)
                        if size:
                            kept[tag][key] = size, _why(key, place, users, immovable, device), reference
                        continue
                    pieces[key] = size
                    if key not in lost.storages:
                        storages[key] = storage
                        to_host += size if place != HOST else 0
        emptied = {key: storage for key, storage in lost.storages.items() if key in pieces or key in self.away}
        return Going(by_tag, new, pieces, storages, storages.keys() & _trained(by_tag), emptied, to_host, kept)

    def _held_by_others(self, name: str) -> tuple[dict[str, Storages], list[Storages]]:
        """What other roles hold that doesn't sleep there, and what lies in residents, by who; and all that both hold.

        Raises:
            ColocateError: Not everything was looked at, or a role can't say what it holds.
        """
        roles = [each for each in self._site.roles.values() if each.name is not None]
        users: dict[str, Storages] = {}
        held: list[Storages] = []
        for role in roles:
            if role.name is None or role.name == name:
                continue
            apart = [other.instance for other in roles if other is not role]
            found, complete = held_by(role.instance, _declared(role), apart, Objects)
            _refuse_partial(role.name, complete)
            held.extend(found.values())
            users[f"role {role.name!r}"] = _all_but(found, self.tags(role.name))
        values = [value for _, value in self._site.store.values()]
        found, leaves = lie_in(values, [each.instance for each in roles], Objects)
        found[Purpose.GRADIENTS].add_all(gradients_of(leaves))
        residents = users["residents"] = Storages()
        for pieces in found.values():
            residents.include(pieces)
        return users, [*held, *found.values()]

    def _immovable(self, found: Collection[Objects], noted: Collection[Objects]) -> dict[int, str]:
        """What can't lose its memory, or mustn't, of what was found beside all that else the roles hold; and why."""
        graphs = any(each.keeps_addresses for each in list(self._site.roles.values()))
        why = {key: _PINNED for each in found for key in each.pinned}
        # Another library may have memory of torch's, too, and torch have it from there once more.
        foreign = _Ranges(self._foreign(noted))
        for key, storage in self._there(found):
            if not self._offload.can_take(storage) or foreign.meet(storage.data_ptr(), storage.nbytes()):
                why[key] = _SHARED if place_of(storage) == HOST and storage.is_shared() else _FOREIGN
            elif graphs and self._is_of_a_graph(storage):
                why[key] = _OF_A_GRAPH
            elif self._site.in_process and HANDED.is_used(key, noted):
                why[key] = _HANDED
        return why

    def _foreign(self, noted: Iterable[Objects]) -> Iterator[tuple[int, int]]:
        for each in noted:
            yield from each.arrays.items()
        for _, storage in self._there(noted):
            if not self._offload.can_take(storage):
                yield storage.data_ptr(), storage.nbytes()

    def _there(self, found: Iterable[Objects]) -> Iterable[tuple[int, Any]]:
        """The storages that don't sleep, by what they are called."""
        storages = {key: storage for each in found for key, storage in each.storages.items()}
        return [(key, storage) for key, storage in storages.items() if key not in self.away]

    def _is_of_a_graph(self, storage: Any) -> bool:
        """Whether it lies in the memory of CUDA graphs, which are replayed: they would write where it was."""
        if place_of(storage) == HOST or self._offload.keeps_address(storage):
            return False
        return self._site.device.is_private(storage.data_ptr())


class _Ranges:
    """Stretches of memory."""

    def __init__(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Args: pieces: Addresses and sizes, which may overlap."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, size in sorted(pieces):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], start + size)
            elif size:
                self._starts.append(start)
                self._stops.append(start + size)

    def meet(self, start: int, size: int) -> bool:
        """Whether something of a piece lies in them."""
        place = bisect.bisect_left(self._starts, start + size) - 1  # the last one that begins before it ends
        return place >= 0 and self._stops[place] > start


def _is_gone(key: int) -> bool:
    """Whether nobody else has a storage that sleeps: there is one Python object of it, which is a use."""
    uses: int = imported("torch")._C._storage_Use_Count(key)
    return uses == 1


def _declared(role: HostedRole) -> Sequence[Any]:
    try:
        return role.declared()
    except Exception as error:
        raise ColocateError(f"device_state() of role {role.name!r} has raised {error_text(error)}") from error


def _refuse_partial(role: str, complete: bool) -> None:
    if not complete:
        raise ColocateError(
            f"role {role!r} holds more objects than were looked at: what else uses the memory isn't known"
        )


def _why(key: int, place: str, users: Mapping[str, Storages], reasons: Mapping[int, str], device: str) -> str:
    """Why a piece stays: others use it, it is elsewhere, or it can't go."""
    using = [who for who, pieces in users.items() if key in pieces.get(place, ())]
    if using:
        return f"used by {' and '.join(using)}"
    return f"on {place}" if place not in {HOST, device} else reasons.get(key, _FOREIGN)


def _trained(by_tag: Mapping[str, Objects]) -> set[int]:
    """What a step of an optimizer writes: what has gradients, these, and the optimizer's state."""
    stepped = {key for tag in _STEPPED for place in by_tag.get(tag, Objects()).values() for key in place}
    return stepped.union(*(pieces.trained for pieces in by_tag.values()))


def _by_tags(found: Holdings) -> dict[str, Objects]:
    """What was found as objects, where each piece counts as the first of what it is for."""
    by_tag = {tag: Objects() for tag in TAGS}
    for tag, pieces, keys in _firsts(found):
        assert isinstance(pieces, Objects)
        own = by_tag[tag]
        for place, sizes in pieces.items():
            own.setdefault(place, {}).update({key: size for key, size in sizes.items() if key in keys})
        own.storages.update({key: each for key, each in pieces.storages.items() if key in keys})
        own.tensors.update({key: each for key, each in pieces.tensors.items() if key in keys})
        own.trained |= pieces.trained & keys
        own.pinned |= pieces.pinned & keys
    return by_tag


def _all_but(found: Holdings, tags: Collection[str]) -> Storages:
    """Those pieces that don't count for one of these tags; see `_by_tags`."""
    others = Storages()
    for tag, pieces, keys in _firsts(found):
        if tag not in tags:
            for place, sizes in pieces.items():
                others.setdefault(place, {}).update({key: sizes[key] for key in sizes.keys() & keys})
    return others


def _firsts(found: Holdings) -> Iterator[tuple[str, Storages, set[int]]]:
    """By what it is for and has a tag: that, what was found, and what is called so that was nothing before."""
    seen: set[int] = set()
    for purpose in Purpose:
        if purpose in _TAG_OF and purpose in found:
            keys = {key for sizes in found[purpose].values() for key in sizes} - seen
            yield _TAG_OF[purpose], found[purpose], keys
            seen |= keys


def _unneeded(found: Holdings, discard: Collection[str], others: Iterable[Storages]) -> Objects:
    """What of a role has contents that nobody needs: what it holds by such tags only, and nobody else.

    It isn't what trains, or is to be differentiated: torch keeps some of that, too. Nor is it indices of sparse and
    jagged tensors, which zeros would make invalid.

    Args:
        found: What the role holds, asleep or not.
        discard: The tags.
        others: What others hold, asleep or not.
    """
    purposes = {purpose for tag in discard for purpose in TAGS[tag]}
    discarded = [each for purpose, each in found.items() if purpose in purposes and isinstance(each, Objects)]
    needed = [*others, *(pieces for purpose, pieces in found.items() if purpose not in purposes)]
    keys = {key for pieces in needed for place in pieces.values() for key in place}
    keys = keys.union(*(pieces.trained | pieces.indices for pieces in discarded))
    nobodys = Objects()
    for pieces in discarded:
        nobodys.storages.update({key: storage for key, storage in pieces.storages.items() if key not in keys})
    return nobodys

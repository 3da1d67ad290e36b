"""What of a role's memory goes when it sleeps, and what comes when it wakes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from colocate._protocol.ledger import TAGS, Purpose
from colocate._system.emptying import Emptying
from colocate._system.imported import imported
from colocate._system.mappings import (
    Area,
    areas_of,
    mappings_now,
    merged,
    own,
    size_of,
    split,
    whole_pages,
    without_areas,
)
from colocate.worker.holdings import Holdings
from colocate.worker.storages import Objects, Storages

OVERLAPS = "in an array that others use"
SHARED = "shared with other processes, or of a file"
SMALL = "in more small pieces than the system allows mappings (vm.max_map_count)"

Kept: TypeAlias = Mapping[str, Mapping[int, tuple[int, str]]]
"""Pieces that were to sleep and are awake, by tag: their sizes, and why."""

_STEPPED = ("grads", "optimizer")
_TAG_OF = {purpose: tag for tag, purposes in TAGS.items() for purpose in purposes}


class Going:
    """What of a role is to sleep, and can.

    Attributes:
        by_tag: What is to, by its tags.
        tags: Those of them of which nothing slept.
        pieces: The sizes of what goes.
        areas: Pages of the host that go.
        storages: Storages of the device that go.
        trained: Those of them that training changes.
        emptied: The pieces whose contents are let go of, also of what sleeps already: they come back as zeros.
        emptying: Those of the host.
        empty_storages: Those of the device.
        kept_on_device: The bytes of the device that go to the host.
        size: The bytes that go.
        kept: The pieces that were to and stay, by tag: their sizes, and why.
    """

    def __init__(
        self,
        by_tag: Mapping[str, Objects],
        unneeded: Objects,
        users: Mapping[str, Storages],
        immovable: Mapping[int, str],
        away: Mapping[int, int],
        asleep: Collection[str],
        device: str,
    ) -> None:
        """Find out.

        Args:
            by_tag: What is to.
            unneeded: What of the role has contents that nobody needs.
            users: What others use, by who does.
            immovable: What can't lose its memory, and why.
            away: The sizes of what sleeps already.
            asleep: The tags of which something may.
            device: The slot's.
        """
        self.by_tag = by_tag
        self.tags = [tag for tag in by_tag if tag not in asleep]
        wanted = {
            key: (place, size)
            for pieces in by_tag.values()
            for place, sizes in pieces.items()
            for key, size in sizes.items()
        }
        awake = Storages()
        for pieces in users.values():
            awake.include(pieces)
        stays = {key for sizes in awake.values() for key in sizes}.union(immovable, away)
        going = {
            key: (place, size) for key, (place, size) in wanted.items() if place in {"cpu", device} and key not in stays
        }
        # Storages of their own may lie in the same memory: those of tensors that were made from parts of an array.
        used = merged(awake.get("cpu", {}).items())
        on_host = _apart({key: size for key, (place, size) in going.items() if place == "cpu"}, used)
        going = {key: each for key, each in going.items() if each[0] != "cpu" or key in on_host}
        mappings = mappings_now() if on_host or unneeded.get("cpu") else []
        # What processes share stays, and is awake.
        others = dict.fromkeys(on_host.keys() - dict(own(on_host.items(), mappings)).keys(), SHARED)
        others |= dict.fromkeys(
            without_areas([each for each in on_host.items() if each[0] not in others], mappings), SMALL
        )
        # What isn't there any more by now, others may have; all else is there until it has gone.
        self._held, left = _held(by_tag.values(), {*on_host, *unneeded.get("cpu", ())})
        for key in on_host.keys() & {*others, *left}:
            del going[key], on_host[key]
        reasons = {**others, **immovable}
        self.kept: Kept = {
            tag: {
                key: (size, _why(key, place, users, reasons, device))
                for place, sizes in pieces.items()
                for key, size in sizes.items()
                if key not in going and key not in away
            }
            for tag, pieces in by_tag.items()
        }
        self.pieces = {key: size for key, (_, size) in going.items()}
        stored = going.keys() - on_host.keys()
        movable = (going.keys() | away.keys()) - left
        emptied = dict(own([(key, size) for key, size in unneeded.get("cpu", {}).items() if key in movable], mappings))
        self.emptying = Emptying.of(emptied.items())
        self.empty_storages = {key: storage for key, storage in unneeded.storages.items() if key in movable}
        self.emptied = emptied.keys() | self.empty_storages.keys()
        self._rewritten = [each for key in self.emptied for each in unneeded.tensors.get(key, ())]
        self.areas = areas_of([(key, size) for key, size in on_host.items() if key not in emptied], mappings)
        objects = {key: storage for pieces in by_tag.values() for key, storage in pieces.storages.items()}
        self.storages = {key: objects[key] for key in stored - self.emptied}
        self.trained = self.storages.keys() & _trained(by_tag)
        self.kept_on_device = sum(self.pieces[key] for key in self.storages)
        self.size = size_of(areas_of(on_host.items(), mappings) if emptied else self.areas)
        self.size += sum(self.pieces[key] for key in stored)

    def are_rewritten(self) -> None:
        """Have autograd know that what is emptied isn't what it may have saved for a backward pass."""
        for reference in self._rewritten:
            tensor = reference()
            if tensor is not None and not tensor.is_inference():
                imported("torch").autograd.graph.increment_version(tensor)


class Coming:
    """What of a role is to be there again.

    Attributes:
        by_tag: What is to, by its tags.
        tags: These.
        pieces: The sizes of its pieces.
        emptied: Those that come as zeros.
        storages: Storages of the device.
        trained: Those of them that will have changed when they go the next time.
        anew: The bytes of the host's memory that come as zeros: they haven't been anywhere.
        on_device: What of all comes to the slot's device, as a ledger counts it.
        kept: What of the same tags is awake, as `Going` has it.
    """

    def __init__(
        self,
        asleep: Mapping[str, Objects],
        tags: Iterable[str],
        away: Mapping[int, int],
        emptied: Collection[int],
        device: str,
        kept: Kept,
    ) -> None:
        """Find out.

        Args:
            asleep: What of the role sleeps, by its tags.
            tags: Those that are to wake.
            away: The sizes of all that sleeps.
            emptied: What of that comes as zeros.
            device: The slot's.
            kept: What of the role is awake though it was to sleep, by its tags.
        """
        self.by_tag = {tag: asleep[tag] for tag in tags}
        self.tags = list(self.by_tag)
        self.kept: Kept = {tag: kept[tag] for tag in self.tags if tag in kept}
        found = list(self.by_tag.values())
        keys = {key for pieces in found for place in pieces.values() for key in place}
        self.pieces = {key: away[key] for key in keys if key in away}
        self.emptied = {key for key in self.pieces if key in emptied}
        self.storages = {key for pieces in found for key in pieces.storages if key in self.pieces}
        self._trained = _trained(self.by_tag) & self.pieces.keys()
        self.trained = self._trained & self.storages
        self.anew = sum(self.pieces[key] for key in self.emptied - self.storages)
        self.on_device = sum(self.pieces.values()) if device == "cpu" else self._stored
        self._held: dict[int, Any] = {}
        self._left: set[int] = set()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block in which it is there."""
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    def hold(self) -> None:
        """It is about to come, and is there until `let_go`. Where something isn't any more, others may lie."""
        self._held, left = _held(self.by_tag.values(), self.pieces.keys() - self.storages)
        if left != self._left:
            self._left = left
            for name in ("areas", "on_host"):
                self.__dict__.pop(name, None)

    def let_go(self) -> None:
        """It has come, or won't: whoever has it may let go of it."""
        self._held = {}

    @functools.cached_property
    def areas(self) -> list[Area]:
        """Pages of the host that were written somewhere. To find them the kernel is asked."""
        return areas_of(self._host_pieces(self.pieces.keys() - self.emptied))

    @functools.cached_property
    def on_host(self) -> int:
        """The bytes of all pages."""
        return size_of(areas_of(self._host_pieces(self.pieces)) if self.emptied else self.areas)

    @property
    def size(self) -> int:
        """All bytes that were away."""
        return self.on_host + self._stored

    def written(self) -> list[Area]:
        """Those of the pages that a step of an optimizer writes."""
        return [area for area, _ in split(whole_pages(self._host_pieces(self._trained - self.emptied)), self.areas)[0]]

    @property
    def _stored(self) -> int:
        return sum(self.pieces[key] for key in self.storages)

    def _host_pieces(self, keys: Iterable[int]) -> Iterator[tuple[int, int]]:
        return ((key, self.pieces[key]) for key in keys if key not in self.storages and key not in self._left)


def _held(found: Iterable[Objects], keys: Collection[int]) -> tuple[dict[int, Any], set[int]]:
    """What pieces of the host's memory lie in, so that nobody else comes to lie there; and those that are gone."""
    owners = [(key, pieces.owners[key]()) for pieces in found for key in pieces.owners.keys() & keys]
    held = {key: owner for key, owner in owners if owner is not None}
    return held, {key for key, _ in owners} - held.keys()


def _why(key: int, place: str, users: Mapping[str, Storages], reasons: Mapping[int, str], device: str) -> str:
    """Why a piece stays: others use it, it is elsewhere, or it can't go."""
    using = [who for who, pieces in users.items() if key in pieces.get(place, ())]
    if using:
        return f"used by {' and '.join(using)}"
    if place not in {"cpu", device}:
        return f"on {place}"
    return reasons.get(key, OVERLAPS)


def _trained(by_tag: Mapping[str, Objects]) -> set[int]:
    """What a step of an optimizer writes: what has gradients, these, and the optimizer's state."""
    stepped = {key for tag in _STEPPED for place in by_tag.get(tag, Objects()).values() for key in place}
    return stepped.union(*(pieces.trained for pieces in by_tag.values()))


def by_tags(found: Holdings) -> dict[str, Objects]:
    """What was found as objects, where each piece counts as the first of what it is for."""
    by_tag = {tag: Objects() for tag in TAGS}
    for tag, pieces, keys in _firsts(found):
        assert isinstance(pieces, Objects)
        own = by_tag[tag]
        for place, sizes in pieces.items():
            own.setdefault(place, {}).update({key: size for key, size in sizes.items() if key in keys})
        own.storages.update({key: each for key, each in pieces.storages.items() if key in keys})
        own.trained |= pieces.trained & keys
        own.pinned |= pieces.pinned & keys
        own.owners.update({key: each for key, each in pieces.owners.items() if key in keys})
    return by_tag


def all_but(found: Holdings, tags: Collection[str]) -> Storages:
    """Those pieces that don't count for one of these tags; see `by_tags`."""
    others = Storages()
    for tag, pieces, keys in _firsts(found):
        if tag not in tags:
            for place, sizes in pieces.items():
                others.setdefault(place, {}).update({key: sizes[key] for key in sizes.keys() & keys})
    return others


def _apart(pieces: Mapping[int, int], used: Sequence[Area]) -> dict[int, int]:
    """Those pieces of the host's memory of which nothing lies in what is used."""
    found = set(split([Area(key, key + size) for key, size in pieces.items()], used)[1])
    return {key: size for key, size in pieces.items() if (key, key + size) in found}


def _firsts(found: Holdings) -> Iterator[tuple[str, Storages, set[int]]]:
    """By what it is for and has a tag: that, what was found, and what is called so that was nothing before."""
    seen: set[int] = set()
    for purpose in Purpose:
        if purpose in _TAG_OF and purpose in found:
            keys = {key for sizes in found[purpose].values() for key in sizes} - seen
            yield _TAG_OF[purpose], found[purpose], keys
            seen |= keys


def unneeded(found: Holdings, discard: Collection[str], others: Iterable[Storages]) -> Objects:
    """What of a role has contents that nobody needs: what it holds by such tags only, and nobody else.

    It isn't what trains, or is to be differentiated: torch keeps some of that, too. Nor is it indices of sparse and
    jagged tensors, which zeros would make invalid.

    Args:
        found: What the role holds, asleep or not.
        discard: The tags.
        others: What others hold, asleep or not.
    """
    purposes = {purpose for tag in discard for purpose in TAGS[tag]}
    discarded = [
        (purpose, pieces) for purpose, pieces in found.items() if purpose in purposes and isinstance(pieces, Objects)
    ]
    kept = Storages()
    for _, pieces in discarded:
        for place, sizes in pieces.items():
            keys = sizes.keys() & (pieces.trained | pieces.indices)
            kept.setdefault(place, {}).update({key: sizes[key] for key in keys})
    needed = [*others, *(pieces for purpose, pieces in found.items() if purpose not in purposes), kept]
    keys = {key for pieces in needed for place in pieces.values() for key in place}
    used = merged(piece for pieces in needed for piece in pieces.get("cpu", {}).items())
    nobodys = Objects()
    for purpose, pieces in discarded:
        for place, sizes in pieces.items():
            # Gradients are of torch's making, also where NumPy has seen them. A step adds to what is there.
            known = sizes.items() if purpose is Purpose.GRADIENTS else pieces.plain.items() & sizes.items()
            alone = {key: size for key, size in known if key not in keys}
            if place == "cpu":
                alone = _apart(alone, used)
            nobodys.setdefault(place, {}).update(alone)
            nobodys.storages.update({key: pieces.storages[key] for key in alone if key in pieces.storages})
            nobodys.tensors.update({key: pieces.tensors[key] for key in alone if key in pieces.tensors})
    return nobodys

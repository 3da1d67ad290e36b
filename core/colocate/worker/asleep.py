"""What of a worker's memory sleeps, as it is noted: by role and tag, and by piece."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set

from colocate.worker.moves import Coming, Going, Kept
from colocate.worker.storages import Objects


class Asleep:
    """It is changed on the lane, and may be read on any thread.

    Attributes:
        roles: What sleeps by role and tag, with what other roles hold too.
        away: The sizes of pieces of memory that aren't there, by what they are called: those of the host by their
            addresses, those of a device by what torch calls their storages.
        emptied: Those of them that are nowhere else either: they come back as zeros.
        why: What was in the way when a role was last to be woken, of those that could not be.
    """

    def __init__(self, device: str) -> None:
        """Nothing sleeps. `device`: the slot's."""
        self._device = device
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
            owners = dict(by_tag[tag].owners)
            there = {key for sizes in list(by_tag[tag].values()) for key in list(sizes)}
            for key, (size, why) in pieces.items():
                if key in there and key not in self.away and not (key in owners and owners[key]() is None):
                    found[why] = found.get(why, 0) + size
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def on_device(self) -> dict[str, tuple[int, int]]:
        """Bytes of the slot's device that sleep, by role, and those of them that come back as zeros.

        Nobody finds them there. Each counts once.
        """
        seen: set[int] = set()
        found: dict[str, tuple[int, int]] = {}
        for role, by_tag in list(self.roles.items()):
            keys = {key for pieces in list(by_tag.values()) for key in pieces.storages} - seen
            sizes = {key: self.away.get(key, 0) for key in keys}
            found[role] = sum(sizes.values()), sum(size for key, size in sizes.items() if key in self.emptied)
            seen |= keys
        return found

    @property
    def on_host(self) -> dict[int, int]:
        """The sizes of pieces of the host's memory that aren't there, by their addresses."""
        pieces = [each for pieces in self._all() for each in list(pieces.get("cpu", {}).items())]
        return {address: size for address, size in pieces if address in self.away}

    def kept_addresses(self) -> set[int]:
        """Where storages of the slot's device are that sleep and keep their addresses."""
        return {
            storage.data_ptr() for pieces in self._all() for key, storage in pieces.storages.items() if key in self.away
        } - {0}

    def freed(self, among: Set[int] | None = None) -> set[int]:
        """Pieces of the host's memory that slept when they were let go of: somebody else may lie there now.

        Args:
            among: What is asked of; None for all.
        """
        owners = [dict(pieces.owners) for pieces in self._all()]  # others change them
        asked = [(each, each.keys() if among is None else each.keys() & among) for each in owners]
        told = [(key, each[key]() is None) for each, keys in asked for key in keys]
        return {key for key, gone in told if gone} - {key for key, gone in told if not gone}

    def forget_freed(self) -> None:
        """They sleep no more."""
        for key in self.freed():
            self.away.pop(key, None)
            self.emptied.discard(key)
        for pieces in self._all():
            for key in [key for key, owner in pieces.owners.items() if owner() is None]:
                del pieces.owners[key]
                for sizes in pieces.values():
                    sizes.pop(key, None)

    def coming(self, name: str, tags: Iterable[str]) -> Coming:
        """What of a role is to be there again; all of these sleep."""
        self.forget_freed()
        return Coming(self.roles[name], tags, self.away, self.emptied, self._device, self._kept.get(name, {}))

    def add(self, name: str, moved: Going | Coming) -> None:
        """A role's memory sleeps, or does still."""
        asleep = self.roles.setdefault(name, {})
        for tag, pieces in moved.by_tag.items():
            joined = Objects()  # others are reading what is there
            for each in (asleep.get(tag), pieces):
                if each is not None:
                    joined.join(each)
            asleep[tag] = joined
        self._kept[name] = {**self._kept.get(name, {}), **moved.kept}  # others are reading this, too
        self.away.update(moved.pieces)
        self.emptied |= moved.emptied

    def remove(self, name: str, moved: Coming | Going) -> None:
        """It is there again, or still."""
        for key in moved.pieces:
            self.away.pop(key, None)  # unless it was let go of meanwhile
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

    def _all(self) -> list[Objects]:
        return [pieces for by_tag in list(self.roles.values()) for pieces in list(by_tag.values())]

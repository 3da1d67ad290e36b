"""What of a role's memory can go: what others need of it stays, and so does what can't lose its memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

from colocate._protocol.ledger import TAGS, Purpose
from colocate._system.jobs import error_text
from colocate._system.mappings import Area, merged, split
from colocate.errors import ColocateError
from colocate.worker.asleep import Asleep
from colocate.worker.handed import HANDED
from colocate.worker.holdings import gradients_of, held_by, lie_in
from colocate.worker.hosted import HostedRole
from colocate.worker.memory_site import Worker
from colocate.worker.moves import Coming, Going, all_but, by_tags, unneeded
from colocate.worker.offload import Offload
from colocate.worker.storages import Objects, Storages

_PINNED = "pinned: the device uses it by itself"
_FOREIGN = "of another library"
_OF_A_GRAPH = "of a CUDA graph, which writes there"
_AWAKE = "awake before that, too"
_HANDED = "handed over by reference, as slots are threads"


class Movable:
    """Finds it, on the lane."""

    def __init__(self, site: Worker, offload: Offload, asleep: Asleep) -> None:
        """Make it.

        Args:
            site: The worker.
            offload: How a device's memory goes.
            asleep: What sleeps.
        """
        self._site = site
        self._offload = offload
        self._asleep = asleep

    def going(self, name: str, tags: Sequence[str], discard: Collection[str] = (), only: Coming | None = None) -> Going:
        """See `Sleeper.going`, which looks at whether there is room, too.

        Raises:
            ColocateError: Not everything can be looked at, where that matters.
        """
        role = self._site.roles[name]
        declared = self._declared(role) if "cache" in tags or discard else ()
        apart = [each.instance for each in self._site.roles.values() if each.name not in (None, name)]
        found, complete = held_by(role.instance, declared, apart, partial(Objects, self._site.boot.device))
        # A device's memory mustn't be used while it sleeps; what is discarded is lost.
        matters = self._site.boot.device != "cpu" or bool(discard)
        self._refuse_partial(name, complete or not matters)
        every = by_tags(found)
        users, others = self._held_by_others(name, matters)
        noted = [each for each in (*found.values(), *others) if isinstance(each, Objects)]
        for tag in TAGS:
            if tag not in tags and tag not in self._asleep.tags(name):
                users[f"its {tag}"] = every[tag]
        by_tag = {tag: every[tag] for tag in tags}
        immovable = self._immovable(by_tag.values(), noted)
        if only is not None:
            keys = {key for pieces in by_tag.values() for sizes in pieces.values() for key in sizes}
            before = {key: why for pieces in only.kept.values() for key, (_, why) in pieces.items()}
            immovable = {key: before.get(key, _AWAKE) for key in keys.difference(only.pieces)} | immovable
        # Threads hand over by reference: a cache may be the driver's tensor, and a gradient what the driver has got.
        loses = bool(discard) and not self._site.in_process
        empty = unneeded(found, discard, others) if loses else Objects()
        asleep, device = self._asleep, self._site.boot.device
        return Going(by_tag, empty, users, immovable, asleep.away, asleep.tags(name), device)

    def _held_by_others(self, name: str, matters: bool) -> tuple[dict[str, Storages], list[Storages]]:
        """What other roles hold that doesn't sleep there, and what lies in residents, by who; and all that both hold.

        Args:
            name: The role.
            matters: Whether all of it has to be known.

        Raises:
            ColocateError: It has, and not everything was looked at, or a role can't say what it holds.
        """
        roles = [each for each in self._site.roles.values() if each.name is not None]
        storages = Objects if matters else Storages
        users: dict[str, Storages] = {}
        held: list[Storages] = []
        for role in roles:
            if role.name is None or role.name == name:
                continue
            apart = [other.instance for other in roles if other is not role]
            declared = self._declared(role) if matters else ()
            found, complete = held_by(role.instance, declared, apart, storages)
            self._refuse_partial(role.name, complete or not matters)
            held.extend(found.values())
            users[f"role {role.name!r}"] = all_but(found, self._asleep.tags(role.name))
        values = [value for _, value in self._site.store.values()]
        found, leaves = lie_in(values, [each.instance for each in roles], storages)
        found[Purpose.GRADIENTS].add_all(gradients_of(leaves))
        kept = users["residents"] = Storages()
        for pieces in found.values():
            kept.include(pieces)
        return users, [*held, *found.values()]

    def _declared(self, role: HostedRole) -> Sequence[Any]:
        try:
            return role.declared()
        except Exception as error:
            raise ColocateError(f"device_state() of role {role.name!r} has raised {error_text(error)}") from error

    def _refuse_partial(self, role: str, complete: bool) -> None:
        if not complete:
            raise ColocateError(
                f"role {role!r} holds more objects than were looked at: what else uses the memory isn't known"
            )

    def _immovable(self, found: Iterable[Objects], noted: Collection[Objects]) -> dict[int, str]:
        """What can't lose its memory, or mustn't, of what was found beside all that else the roles hold; and why."""
        graphs = any(each.keeps_addresses for each in list(self._site.roles.values()))
        pieces = list(found)
        storages = self._in_memory(pieces)
        # Another library may have memory of torch's, too, and torch have it from there once more.
        foreign = merged(
            (storage.data_ptr(), storage.nbytes())
            for storage in self._in_memory(noted).values()
            if not self._offload.can_take(storage)
        )
        why = {key: _PINNED for each in pieces for key in each.pinned}
        for key, storage in storages.items():
            if split([Area(storage.data_ptr(), storage.data_ptr() + storage.nbytes())], foreign)[0]:
                why[key] = _FOREIGN
            elif graphs and self._is_of_a_graph(storage):
                why[key] = _OF_A_GRAPH
            elif self._site.in_process and HANDED.is_used(key, noted):
                why[key] = _HANDED
        return why

    def _in_memory(self, found: Iterable[Objects]) -> dict[int, Any]:
        """The storages of the device that don't sleep, by what they are called."""
        return {
            key: storage for each in found for key, storage in each.storages.items() if key not in self._asleep.away
        }

    def _is_of_a_graph(self, storage: Any) -> bool:
        """Whether it lies in the memory of CUDA graphs, which are replayed: they would write where it was."""
        return self._site.device.is_private(storage.data_ptr()) and not self._offload.keeps_address(storage)

"""Memory of roles that sleeps: a role's tensors go from the worker's memory to a file, and come back in place.

Both are done by all ranks of the role or by none: each does what may fail, then they meet at the driver, and only when
all are ready it is made so. What lies where is `_system.pages`'s.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from colocate._protocol import messages
from colocate._protocol.consequence import Consequence
from colocate._protocol.ledger import TAGS, Purpose
from colocate._protocol.message import Message
from colocate._role.context import running_call
from colocate._role.method_spec import MethodSpec
from colocate._system.pages import SpillFile, areas_of, bring_back
from colocate._system.room import free_memory, spill_directories
from colocate._system.sizes import size_text
from colocate.errors import ColocateError, SleepingError
from colocate.executor import Boot
from colocate.worker.holdings import Holdings, Storages, held_by
from colocate.worker.hosted import HostedRole
from colocate.worker.store import Store

_NO_ROOM = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Worker(Protocol):
    """What it needs of its worker; see `Site`."""

    boot: Boot
    store: Store
    roles: dict[Any, HostedRole]
    spill_dir: str | None

    def ask(self, question: Message) -> Any:
        """Ask the driver."""
        ...


@attrs.frozen
class Outcome:
    """What has become of it on one rank.

    Attributes:
        refusal: Why a rank could not do it, so that none has; None when all have.
        own: Whether that was this rank.
        fits: Whether there was room for it here.
        nbytes: The bytes that have gone, or come back, here.
        stay: Of what was to go, the bytes that stay.
    """

    refusal: str | None = None
    own: bool = False
    fits: bool = True
    nbytes: int = 0
    stay: int = 0


class Sleeper:
    """Puts memory of a worker's roles to sleep and wakes it, on the lane.

    Attributes:
        away: The sizes of storages that aren't in memory, by their addresses.
        free: How much memory is free.
    """

    def __init__(self, site: Worker) -> None:
        self._site = site
        self._file: SpillFile | None = None
        self._asleep: dict[str, dict[str, Storages]] = {}  # by role and tag, with what other roles hold too
        self._why: dict[str, str] = {}  # roles could not be woken when that was last tried
        self.away: dict[int, int] = {}
        self.free: Callable[[], int] = free_memory

    def tags(self, role: str | None) -> Sequence[str]:
        """What of a role sleeps."""
        return () if role is None else tuple(self._asleep.get(role, ()))

    def check(self, role: HostedRole, spec: MethodSpec) -> None:
        """Raise when a method's role isn't as awake as the method needs it.

        Raises:
            SleepingError: It isn't.
        """
        asleep = [tag for tag in self.tags(role.name) if spec.awake is None or tag in spec.awake]
        if asleep:
            why = self._why.get(role.name or "")
            raise SleepingError(
                f"{role.label(spec.name)} needs memory of its role that sleeps ({', '.join(asleep)})"
                f"{f', and that could not be woken: {why}' if why else ''}"
            )

    def refuse(self, role: str) -> None:
        """Raise when somebody wants a role's object while memory of it sleeps.

        Raises:
            SleepingError: It does.
        """
        if asleep := self.tags(role):
            raise SleepingError(
                f"memory of role {role!r} sleeps ({', '.join(asleep)}): wake it with group.wake({role!r}), or call one "
                "of its methods, before something in its workers uses it"
            )

    def sleep(self, name: str, tags: Sequence[str], members: int) -> Outcome:
        """Put memory of a role to sleep, if all ranks can.

        Args:
            name: The role.
            tags: What of it; what sleeps already stays so.
            members: How many workers take part.
        """
        role = self._site.roles.get(name)
        new = [tag for tag in TAGS if tag in tags and tag not in self.tags(name)]
        if role is None or not new:
            return Outcome(self._agree(members, None))
        by_tag: dict[str, Storages] = {}
        going: dict[int, int] = {}
        size = stay = 0

        def begin() -> Callable[[], None]:
            nonlocal by_tag, going, size, stay
            by_tag, going, stay = self._look(name, role, new)
            areas = areas_of(going.items())
            size = sum(area.stop - area.start for area in areas)
            written = self._spill().write(areas)
            role.call_hook("sleep", tuple(new))
            return written.put_away

        outcome = self._all_or_none(role, members, begin, lambda: role.call_hook("wake", tuple(new)))
        if outcome.refusal is not None:
            return outcome
        self._asleep.setdefault(name, {}).update(by_tag)
        self.away.update(going)
        return Outcome(nbytes=size, stay=stay + sum(going.values()) - size)

    def wake(self, name: str, tags: Sequence[str], members: int, beside: Mapping[str, int]) -> Outcome:
        """Have memory of a role be there again, if it is so on all ranks.

        Args:
            name: The role.
            tags: What of it.
            members: How many workers take part.
            beside: How many of these lie on each node.
        """
        role = self._site.roles.get(name)
        asleep = [tag for tag in self.tags(name) if tag in tags]
        if role is None or not asleep:
            return Outcome(self._agree(members, None))
        coming = self._coming(name, asleep)
        areas = areas_of(coming.items())
        size = sum(area.stop - area.start for area in areas)
        share = self.free() // beside.get(self._site.boot.node, 1)

        def begin() -> Callable[[], None]:
            if size > share:
                raise MemoryError(f"{size_text(size)} are needed, and {size_text(share)} are free for this rank")
            bring_back(areas)
            return lambda: None

        outcome = self._all_or_none(role, members, begin, lambda: self._spill().write(areas).put_away())
        if outcome.refusal is None:
            self._are_awake(name, asleep, coming)
            role.call_hook("wake", tuple(asleep))
            return Outcome(nbytes=size)
        self._why[name] = outcome.refusal
        return outcome

    def wake_alone(self, role: HostedRole) -> None:
        """Have all of a role be there again on this rank, as on all others: their models are about to be renewed."""
        if asleep := self.tags(role.name):
            assert role.name is not None
            coming = self._coming(role.name, asleep)
            bring_back(areas_of(coming.items()))
            self._are_awake(role.name, asleep, coming)
            role.call_hook("wake", tuple(asleep))

    def in_memory(self) -> int:
        """Bytes of the file that are memory of the process again."""
        return 0 if self._file is None else self._file.in_memory()

    def close(self) -> None:
        """The worker ends."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- all ranks or none

    def _all_or_none(
        self, role: HostedRole, members: int, begin: Callable[[], Callable[[], None]], undo: Callable[[], object]
    ) -> Outcome:
        """Begin, and end it when all ranks have begun; otherwise undo it.

        Raises:
            Consequence: The call was given up; it is undone.
        """
        refusal: str | None = None
        end: Callable[[], None] | None = None
        fits = True
        try:
            end = begin()
        except Exception as error:  # also of the role's own hook: it isn't done then, and that is told to all
            fits = not isinstance(error, MemoryError) and getattr(error, "errno", 0) not in _NO_ROOM
            own = isinstance(error, (OSError, MemoryError, ValueError, ColocateError))
            what = "" if own else f"{type(error).__name__}: "
            refusal = f"rank {role.ctx.rank} (node {role.ctx.node}): {what}{error}"
        try:
            refusal = self._agree(members, refusal)
        except Consequence:
            if end is not None:
                undo()
            raise
        if refusal is None and end is not None:
            end()
        elif end is not None:
            undo()
        return Outcome(refusal, end is None, fits)

    def _agree(self, members: int, refusal: str | None) -> str | None:
        """What a rank has against it; None when all are ready."""
        call = running_call.get()
        assert call is not None
        try:
            self._site.ask(messages.Meet(f"sleep {call.seq}", members, None, False, refusal))
        except Consequence:
            raise
        except ColocateError as error:
            return error.message
        return None

    # -- what sleeps

    def _look(
        self, name: str, role: HostedRole, tags: Iterable[str]
    ) -> tuple[dict[str, Storages], dict[int, int], int]:
        """What is to sleep by its tags, what of it can go with its sizes, and the bytes that somebody awake has too.

        Raises:
            SleepingError: Memory of a GPU is among it.
        """
        roles = {each.name: each for each in self._site.roles.values() if each.name is not None}
        apart = {each: [other.instance for other in roles.values() if other is not roles[each]] for each in roles}
        found, _ = held_by(role.instance, role.declared() if "cache" in tags else (), apart[name])
        by_tag = _by_tag(found)
        elsewhere = {where for tag in tags for where, pieces in by_tag[tag].items() if where != "cpu" and pieces}
        if elsewhere:
            raise SleepingError(
                f"role {name!r} has memory on {', '.join(sorted(elsewhere))}: only the host's can sleep"
            )
        awake = self._held_awake(name, roles, apart)
        for tag in TAGS:
            if tag not in tags and tag not in self.tags(name):
                awake.update(by_tag[tag].get("cpu", {}))
        wanted = {key: size for tag in tags for key, size in by_tag[tag].get("cpu", {}).items()}
        going = {key: size for key, size in wanted.items() if key not in awake and key not in self.away}
        return {tag: by_tag[tag] for tag in tags}, going, sum(size for key, size in wanted.items() if key in awake)

    def _held_awake(
        self, name: str, roles: Mapping[str, HostedRole], apart: Mapping[str, Iterable[object]]
    ) -> dict[int, int]:
        """What other roles hold that doesn't sleep there, and what lies in residents."""
        awake: dict[int, int] = {}
        for other in roles:
            if other != name:
                asleep = self._asleep.get(other, {})
                for tag, pieces in _by_tag(held_by(roles[other].instance, (), apart[other])[0]).items():
                    if tag not in asleep:
                        awake.update(pieces.get("cpu", {}))
        kept = Storages()
        for _, value in self._site.store.values():
            kept.add(value)
        awake.update(kept.get("cpu", {}))
        return awake

    def _coming(self, name: str, tags: Iterable[str]) -> dict[int, int]:
        asleep = self._asleep[name]
        keys = (key for tag in tags for key in asleep[tag].get("cpu", {}))
        return {key: self.away[key] for key in keys if key in self.away}

    def _are_awake(self, name: str, tags: Iterable[str], coming: Iterable[int]) -> None:
        for key in coming:
            del self.away[key]
        self._why.pop(name, None)
        asleep = self._asleep[name]
        for tag in tags:
            del asleep[tag]
        if not asleep:
            del self._asleep[name]

    def _spill(self) -> SpillFile:
        if self._file is None:
            reasons = []
            for directory in spill_directories(self._site.spill_dir):
                try:
                    self._file = SpillFile(Path(directory))
                    break
                except (OSError, ValueError) as error:
                    reasons.append(str(error))
            else:
                raise ValueError(
                    f"nothing can be put away ({'; '.join(reasons)}): name a folder on a disk as spill_dir"
                )
        return self._file


def _by_tag(found: Holdings) -> dict[str, Storages]:
    """What was found, where each piece counts as the first of what it is for."""
    tag_of = {purpose: tag for tag, purposes in TAGS.items() for purpose in purposes}
    by_tag = {tag: Storages() for tag in TAGS}
    seen: set[tuple[str, int]] = set()
    for purpose in Purpose:
        if purpose not in tag_of:
            continue
        for device, pieces in found.get(purpose, {}).items():
            own = by_tag[tag_of[purpose]].setdefault(device, {})
            own.update({key: size for key, size in pieces.items() if (device, key) not in seen})
            seen.update((device, key) for key in pieces)
    return by_tag

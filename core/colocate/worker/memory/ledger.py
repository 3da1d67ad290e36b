"""The ledger of a worker's memory: who has how much of it. Each byte counts once."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs

from colocate._devices.cuda_driver import beside_captures
from colocate._protocol.ledger import Ledger, Purpose
from colocate._role import torch_books
from colocate.gpus import in_use
from colocate.worker.memory.holdings import Holdings, held_beside, held_by, lie_in
from colocate.worker.memory.site import Worker
from colocate.worker.memory.sleeping import Sleeper
from colocate.worker.memory.storages import Storages
from colocate.worker.memory.vmm import absent
from colocate.worker.serving.failure import LOOKING


class LookError(Exception):
    """What a role holds can't be looked at: its `device_state()` has raised, or code of a tensor of its own kind.

    So may looking at what the role changes just then. The role's name, and the traceback.
    """

    def __init__(self, role: str, trace: str) -> None:
        super().__init__(role, trace)
        self.role, self.trace = role, trace


def ledger(
    site: Worker, sleeper: Sleeper, gradients: Callable[[Mapping[str, list[Any]]], Mapping[str, Storages]]
) -> Ledger:
    """Look at everything that a worker holds, beside the lane.

    Args:
        site: The worker.
        sleeper: What of it sleeps.
        gradients: What is known of those of its roles' tensors, see `Gradients`.

    Raises:
        LookError: What a role holds can't be looked at.
    """
    names = [role.name for role in list(site.roles.values()) if role.name is not None]
    held: dict[str, Holdings] = {}
    leaves: dict[str, list[Any]] = {}
    partial: list[str] = []
    for name in names:
        with _looking_at(name):
            held[name], complete, leaves[name] = held_beside(*_of(site, name))
        if not complete:
            partial.append(name)
    for name, pieces in gradients(leaves).items():
        if name in held:
            held[name][Purpose.GRADIENTS].include(pieces)
    shares = shares_of(site, sleeper, held)
    return Ledger(
        shares.owned,
        shares.shared,
        shares.asleep,
        {name: kept for name in names if (kept := sleeper.asleep.kept_awake(name))},
        tuple(partial),
        None if site.process is None else site.process.look(sleeper.offload.pinned),
        _gpu(site.boot.device, site.in_process),
        None if site.device.peaks is None else dict(site.device.peaks),
    )


def look_at(site: Worker, name: str) -> tuple[Holdings, bool]:
    """What a role holds, and whether that is all, on the lane; see `held_by`.

    Raises:
        LookError: It can't be looked at.
    """
    with _looking_at(name):
        return held_by(*_of(site, name))


def _of(site: Worker, name: str) -> tuple[object, Iterable[Any], list[object]]:
    """A role, what it says that it holds, and other roles."""
    role = site.roles[name]
    others = [other.instance for other in list(site.roles.values()) if other.name not in (None, name)]
    return role.instance, role.declared(), others


@attrs.frozen
class Shares:
    """What roles have, where each byte counts once.

    Attributes:
        owned: Bytes by role, kind and device.
        shared: What of its memory counts with another role, by role.
        asleep: What sleeps, by role.
        emptied: What of that comes back as zeros, and is nowhere until then.
    """

    owned: dict[str, dict[tuple[str, str], int]]
    shared: dict[str, int]
    asleep: dict[str, int]
    emptied: dict[str, int]


def shares_of(
    site: Worker,
    sleeper: Sleeper,
    held: Mapping[str, Holdings],
    more: Mapping[str, Any] | None = None,
) -> Shares:
    """What roles have, with their residents.

    Args:
        site: The worker.
        sleeper: What of it sleeps.
        held: What they hold.
        more: Values that are about to be kept, by who has made them.

    Raises:
        LookError: A resident can't be looked at.
    """
    found: dict[str, Holdings] = {name: {**each, Purpose.RESIDENTS: Storages()} for name, each in held.items()}
    for owner, values in _residents(site, more or {}).items():
        kept = found.setdefault(owner, {}).setdefault(Purpose.RESIDENTS, Storages())
        with _looking_at(owner):
            holdings, _ = lie_in(values, [each.instance for each in list(site.roles.values())])
        for pieces in holdings.values():
            kept.include(pieces)
    owned, shared = _shares(found, sleeper.asleep.kept_addresses())
    asleep, emptied = dict.fromkeys(found, 0), dict.fromkeys(found, 0)
    for name, (size, as_zeros) in sleeper.asleep.by_role().items():
        asleep[name], emptied[name] = size, as_zeros
    return Shares(owned, shared, asleep, emptied)


def _residents(site: Worker, more: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of each role; "": of functions."""
    found: dict[str, list[Any]] = {}
    for maker, value in [*site.store.values(), *more.items()]:
        owner, _, method = maker.partition(".")
        found.setdefault(owner if method else "", []).append(value)
    return found


@contextlib.contextmanager
def _looking_at(role: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # a `device_state()` may even end the interpreter
        raise LookError(role, traceback.format_exc()) from error


def _shares(
    held: Mapping[str, Holdings], absent: Collection[int]
) -> tuple[dict[str, dict[tuple[str, str], int]], dict[str, int]]:
    """What each role has, and what of that counts with another one; `absent` has addresses where memory sleeps.

    What several hold counts as the first of the kinds that it is of, with the first of the roles for which it is that.
    """
    owners: dict[str, dict[int, str]] | None = {} if _overlap(held) else None
    owned: dict[str, dict[tuple[str, str], int]] = {role: {} for role in held}
    shared: dict[str, dict[tuple[str, int], int]] = {role: {} for role in held}
    counted, without_memory = _once(held), frozenset(absent)
    for purpose in Purpose:
        for role, found in held.items():
            for device, pieces in found.get(purpose, {}).items():
                if counted and device == "cpu":
                    pieces = {each: counted[each] for each in pieces}
                first = pieces
                if owners is not None:
                    its_owners = owners.setdefault(device, {})
                    if known := its_owners.keys() & pieces.keys():
                        shared[role] |= {(device, each): pieces[each] for each in known if its_owners[each] != role}
                        first = {each: nbytes for each, nbytes in pieces.items() if each not in known}
                    its_owners |= dict.fromkeys(first, role)
                nbytes = sum(first.values())
                if without_memory:
                    nbytes -= sum(map(first.__getitem__, first.keys() & without_memory))
                if nbytes:
                    owned[role][purpose.word, device] = nbytes
    return owned, {role: sum(pieces.values()) for role, pieces in shared.items()}


def _overlap(held: Mapping[str, Holdings]) -> bool:
    """Whether something is of several kinds, or several roles hold it: nearly always nothing is."""
    found: dict[str, list[Mapping[int, int]]] = {}
    for holdings in held.values():
        for pieces in holdings.values():
            for device, sizes in pieces.items():
                found.setdefault(device, []).append(sizes)
    return any(len(each) > 1 and len(set[int]().union(*each)) < sum(map(len, each)) for each in found.values())


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


def _gpu(device: str, in_process: bool = False) -> dict[str, int] | None:
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
        of_groups = torch_books.nbytes()
    return found if of_groups is None else {**found, "nccl": of_groups}

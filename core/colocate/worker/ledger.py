"""The ledger of a worker's memory: who has how much of it. Each byte counts once."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from colocate._protocol.ledger import Ledger, Purpose
from colocate._system.imported import imported
from colocate.worker.holdings import Holdings, Storages, held_by

if TYPE_CHECKING:
    from colocate.worker.site import Site


class LookError(Exception):
    """What a role holds can't be looked at: its `device_state()` has raised, or code of a tensor of its own kind.

    So may looking at what the role changes just then. The role's name, and the traceback.
    """

    def __init__(self, role: str, trace: str) -> None:
        super().__init__(role, trace)
        self.role, self.trace = role, trace


def ledger(site: Site) -> Ledger:
    """Look at everything that a worker holds, on any thread.

    Raises:
        LookError: What a role holds can't be looked at.
    """
    roles = {role.name: role for role in list(site.roles.values()) if role.name is not None}
    held: dict[str, Holdings] = {}
    partial: list[str] = []
    for name, role in roles.items():
        others = [other.instance for other in roles.values() if other is not role]
        with _looking_at(name):
            held[name], complete = held_by(role.instance, role.declared(), others)
        if not complete:
            partial.append(name)
    for maker, value in site.store.values():
        owner, _, method = maker.partition(".")
        kept = held.setdefault(owner if method else "", {})
        with _looking_at(owner):
            kept.setdefault(Purpose.RESIDENTS, Storages()).add(value)
    owned, shared, asleep = _shares(held, dict(site.sleeper.away))
    for name, size in site.sleeper.on_device().items():
        asleep[name] += size
    private = None if site.in_process else private_bytes() + site.sleeper.in_memory()
    return Ledger(owned, shared, asleep, tuple(partial), private, site.empty, _gpu(site.boot.device))


@contextlib.contextmanager
def _looking_at(role: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # a `device_state()` may even end the interpreter
        raise LookError(role, traceback.format_exc()) from error


def private_bytes() -> int:
    """The memory of this process that isn't mapped from files or shared on purpose."""
    # Not by psutil: each worker asks once as it starts, and to import that takes as long as all the rest of a start.
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def _shares(
    held: Mapping[str, Holdings], away: Mapping[int, int]
) -> tuple[dict[str, dict[tuple[str, str], int]], dict[str, int], dict[str, int]]:
    """Each role's bytes by kind and device, what of its memory counts with another role, and what sleeps.

    What several hold counts as the first of the kinds that it is of, with the first of the roles for which it is that.
    """
    owners: dict[str, dict[int, str]] = {}
    owned: dict[str, dict[tuple[str, str], int]] = {role: {} for role in held}
    shared: dict[str, dict[tuple[str, int], int]] = {role: {} for role in held}
    asleep = dict.fromkeys(held, 0)
    for purpose in Purpose:
        for role, found in held.items():
            for device, pieces in found.get(purpose, {}).items():
                its_owners, own = owners.setdefault(device, {}), 0
                for address, nbytes in pieces.items():
                    owner = its_owners.get(address)
                    if owner is None:
                        its_owners[address] = role
                        if device == "cpu" and address in away:
                            asleep[role] += nbytes
                        else:
                            own += nbytes
                    elif owner != role:
                        shared[role][device, address] = nbytes
                if own:
                    owned[role][purpose.word, device] = own
    return owned, {role: sum(pieces.values()) for role, pieces in shared.items()}, asleep


def _gpu(device: str) -> dict[str, int] | None:
    torch = imported("torch")
    if torch is None or not device.startswith("cuda") or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "used": total - free,
        "total": total,
    }

"""A model of the law of ownership: the expected state of all that a program opens and closes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from colocate import Call, ColocatedGroup, Pool, Resident, Runtime

from .tenants import Tenant


@attrs.define(eq=False)
class OneCall:
    """An unfinished call, at a gate or behind a call at a gate."""

    group: Group
    call: Call[Any]
    label: str
    value: Any
    gate: Path | None = None
    uses: OneResident | None = None


@attrs.define(eq=False)
class OneResident:
    """A kept result that has a name or a use."""

    group: Group
    resident: Resident[Any] | None
    label: str
    value: Any
    poisoned: bool = False
    seen: bool = False
    freed: bool = False
    made: bool = True


@attrs.define(eq=False)
class Group:
    """A spawned group."""

    pool: OnePool
    group: ColocatedGroup
    name: str
    slots: int
    calls: list[OneCall] = attrs.field(factory=list)
    residents: list[OneResident] = attrs.field(factory=list)
    unseen: int = 0
    closed: bool = False
    dead: bool = False

    @property
    def tenant(self) -> Tenant:
        return self.group.role("tenant", Tenant)

    def is_used(self, resident: OneResident) -> bool:
        """Return whether an unfinished call uses a resident."""
        everyone = itertools.chain.from_iterable(group.calls for group in self.pool.runtime.groups())
        return any(call.uses is resident for call in everyone)

    def held(self) -> int:
        """Return how many residents the group's workers hold."""
        return sum(1 for each in self.residents if (each.resident is not None and not each.freed) or self.is_used(each))

    def leased(self) -> list[OneResident]:
        """Return the residents that still have a name or a use."""
        return [r for r in self.residents if not r.freed and (r.resident is not None or self.is_used(r))]

    def borrowers(self) -> set[Group]:
        """Return the other groups that use the group's residents now."""
        groups = [group for group in self.pool.runtime.groups() if group is not self]
        return {g for g in groups if any(c.uses is not None and c.uses.group is self for c in g.calls)}


@attrs.define(eq=False)
class OnePool:
    """A reserved pool."""

    runtime: OneRuntime
    pool: Pool
    name: str
    slots: int
    group: Group | None = None
    closed: bool = False


@attrs.define(eq=False)
class OneRuntime:
    """An open runtime with a number of CPUs."""

    runtime: Runtime
    cpus: int
    pools: list[OnePool] = attrs.field(factory=list)
    closed: bool = False

    @property
    def free(self) -> int:
        """The number of CPUs outside all pools."""
        return self.cpus - sum(pool.slots for pool in self.pools)

    def groups(self) -> Iterator[Group]:
        """Return the living groups."""
        return (pool.group for pool in self.pools if pool.group is not None)

    def below(self) -> list[tuple[str, str]]:
        """Return kind and name of everything that lives in the runtime, itself included."""
        found = [("runtime", "local")]
        for pool in self.pools:
            found.append(("pool", pool.name))
            if pool.group is not None:
                group = pool.group
                found.append(("group", group.name))
                found += [("worker", str(slot)) for slot in range(group.slots)]
                found += [("role", f"tenant rank {rank}/{group.slots}") for rank in range(group.slots)]
                found += [("resident", resident.label) for resident in group.leased()]
                found += [("call", call.label) for call in group.calls]
        return sorted(found)

"""What a program that opens and closes things should see: a model of the law of ownership."""

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
    """A call that hasn't ended: it waits at a gate, or behind one that does."""

    group: Group
    call: Call[Any]
    label: str
    value: Any
    gate: Path | None = None
    uses: OneResident | None = None


@attrs.define(eq=False)
class OneResident:
    """A kept result, while there is a name for it or a use of it."""

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
    """A group that was spawned."""

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
        """The view of its role."""
        return self.group.role("tenant", Tenant)

    def is_used(self, resident: OneResident) -> bool:
        """Whether an unfinished call uses a resident."""
        everyone = itertools.chain.from_iterable(group.calls for group in self.pool.runtime.groups())
        return any(call.uses is resident for call in everyone)

    def held(self) -> int:
        """How many residents its workers hold."""
        return sum(1 for each in self.residents if (each.resident is not None and not each.freed) or self.is_used(each))

    def leased(self) -> list[OneResident]:
        """The residents that somebody can still name."""
        return [r for r in self.residents if not r.freed and (r.resident is not None or self.is_used(r))]

    def borrowers(self) -> set[Group]:
        """The other groups that use its residents now."""
        groups = [group for group in self.pool.runtime.groups() if group is not self]
        return {g for g in groups if any(c.uses is not None and c.uses.group is self for c in g.calls)}


@attrs.define(eq=False)
class OnePool:
    """A pool that was reserved."""

    runtime: OneRuntime
    pool: Pool
    name: str
    slots: int
    group: Group | None = None
    closed: bool = False


@attrs.define(eq=False)
class OneRuntime:
    """A runtime that was opened, with so many CPUs."""

    runtime: Runtime
    cpus: int
    pools: list[OnePool] = attrs.field(factory=list)
    closed: bool = False

    @property
    def free(self) -> int:
        """The CPUs that no pool has."""
        return self.cpus - sum(pool.slots for pool in self.pools)

    def groups(self) -> Iterator[Group]:
        """Its living groups."""
        return (pool.group for pool in self.pools if pool.group is not None)

    def below(self) -> list[tuple[str, str]]:
        """Kind and name of everything that lives in it, itself included, but for the roles."""
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

"""Memory budgets of slots, groups and roles, as declared by users and as sent to workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from colocate import features
from colocate._system.numbers import parse_bytes


@attrs.frozen
class Limit:
    """A limit on the memory of one slot.

    Attributes:
        owner: Owner of the limit, as named in errors.
        role: The role; None for all roles of the slot together.
        device: Whether the limit is on the slot's device; otherwise on the host, sleeping memory included.
        nbytes: The limit in bytes.
        is_shared: Whether roles of other groups on the slot count, too.
    """

    owner: str
    role: str | None
    device: bool
    nbytes: int
    is_shared: bool = False

    @property
    def word(self) -> str:
        """The name of the option that declares this limit."""
        return "device_memory" if self.device else "host_memory"


@attrs.frozen
class Budgets:
    """The memory budgets of a group, as sent to workers.

    Attributes:
        limits: The limits on memory.
        activations: By role, the device bytes reserved for computation in methods.
        swap: Whether roles take turns to keep the common limits.
        step: The roles in the order of calls in one step, if declared.
    """

    limits: tuple[Limit, ...] = ()
    activations: Mapping[str, int] = attrs.field(factory=dict)
    swap: bool = False
    step: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.limits)

    def encode(self) -> tuple[Any, ...]:
        """Return the wire format of the budgets."""
        return [attrs.astuple(limit) for limit in self.limits], dict(self.activations), self.swap, self.step

    @classmethod
    def decode(cls, plain: Sequence[Any]) -> Budgets:
        """Rebuild budgets from their wire format (the inverse of `encode`)."""
        limits, *more = plain
        return cls(tuple(Limit(*limit) for limit in limits), *more)


NO_BUDGETS = Budgets()


@attrs.frozen
class Budget:
    """A limit on a slot's memory, in bytes; None for no limit.

    Attributes:
        device: Limit on the slot's device.
        host: Limit on the host, sleeping memory included.
    """

    device: int | None = None
    host: int | None = None

    @classmethod
    def from_sizes(cls, device_memory: str | int | None, host_memory: str | int | None, what: str = "") -> Budget:
        """Parse the sizes of a budget.

        Args:
            device_memory: "20GiB", or bytes.
            host_memory: "20GiB", or bytes.
            what: Prefix of the options' names in errors.

        Raises:
            ConfigError: A size is malformed.
        """
        device = None if device_memory is None else parse_bytes(device_memory, f"{what}device_memory")
        return cls(device, None if host_memory is None else parse_bytes(host_memory, f"{what}host_memory"))


NO_BUDGET = Budget()


def budgets(
    slot: Budget,
    group: Budget,
    roles: Mapping[str, Any],
    residency: Literal["swap"] | None = None,
    step: Sequence[str] | None = None,
    is_shared: bool = False,
) -> Budgets:
    """Return the budgets of a group, computed by the feature "memory" if any budgets are declared.

    Raises:
        ConfigError: The budgets contradict each other.
        CapabilityError: Budgets are declared, and the feature isn't installed.
    """
    declared = any((residency, step, *(spec.activations for spec in roles.values())))
    if not declared and {slot, group, *(spec.budget for spec in roles.values())} == {NO_BUDGET}:
        return NO_BUDGETS
    group_budgets: Budgets = features.import_module_of("memory.budgets").build_budgets(
        slot, group, roles, residency, step, is_shared
    )
    return group_budgets

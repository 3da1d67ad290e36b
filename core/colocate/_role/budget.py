"""Memory budgets: of a pool's slots, a group and its roles, as they are declared and as workers are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from colocate import features
from colocate._system.numbers import parse_bytes


@attrs.frozen
class Limit:
    """How much somebody may have on one slot.

    Attributes:
        owner: Who that is, as errors say it.
        role: The role; None for all roles of the slot together.
        device: Whether it is memory of the slot's device; otherwise the host's, with what sleeps.
        nbytes: How many bytes.
        is_shared: Whether it is of roles of other groups on the slot, too.
    """

    owner: str
    role: str | None
    device: bool
    nbytes: int
    is_shared: bool = False

    @property
    def word(self) -> str:
        """Return what it is called where it is set."""
        return "device_memory" if self.device else "host_memory"


@attrs.frozen
class Budgets:
    """The budgets of a group.

    Attributes:
        limits: What mustn't be exceeded.
        activations: By role, the bytes of the device that stay free for what its methods compute with.
        swap: Whether roles take turns, so that what is set for all of them together is kept.
        step: The roles in the order in which they are called again and again, where that was declared.
    """

    limits: tuple[Limit, ...] = ()
    activations: Mapping[str, int] = attrs.field(factory=dict)
    swap: bool = False
    step: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.limits)

    def plain(self) -> tuple[Any, ...]:
        """Return the budgets as they travel."""
        return [attrs.astuple(limit) for limit in self.limits], dict(self.activations), self.swap, self.step

    @classmethod
    def read(cls, plain: Sequence[Any]) -> Budgets:
        """Return what has travelled."""
        limits, *more = plain
        return cls(tuple(Limit(*limit) for limit in limits), *more)


NO_BUDGETS = Budgets()


@attrs.frozen
class Budget:
    """How many bytes of a slot's memory somebody may have; None for no limit.

    Attributes:
        device: On the slot's device.
        host: In the host's memory, with what sleeps.
    """

    device: int | None = None
    host: int | None = None

    @classmethod
    def of(cls, device_memory: str | int | None, host_memory: str | int | None, what: str = "") -> Budget:
        """The budget of such sizes.

        Args:
            device_memory: "20GiB", or bytes.
            host_memory: Likewise.
            what: What they are given to, as errors say it before their names.

        Raises:
            ConfigError: One of them is no size.
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
    """Return the budgets of a group, by the feature "memory"; see its `budgets.budgets`.

    Raises:
        ConfigError: They contradict each other.
        CapabilityError: There are some, and not that feature.
    """
    declared = any((residency, step, *(spec.activations for spec in roles.values())))
    if not declared and {slot, group, *(spec.budget for spec in roles.values())} == {NO_BUDGET}:
        return NO_BUDGETS
    found: Budgets = features.module("memory.budgets").budgets(slot, group, roles, residency, step, is_shared)
    return found

"""Memory budgets: of a pool's slots, a group and its roles, as they are declared and as workers are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from colocate._system.nearest import did_you_mean
from colocate._system.numbers import parse_bytes, shown, size_text
from colocate.errors import ConfigError


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

    def limits(self, owner: str, role: str | None = None, is_shared: bool = False) -> list[Limit]:
        """Return what it says, as workers are told."""
        sizes = ((True, self.device), (False, self.host))
        return [Limit(owner, role, device, nbytes, is_shared) for device, nbytes in sizes if nbytes is not None]


NO_BUDGET = Budget()


def budgets(
    slot: Budget,
    group: Budget,
    roles: Mapping[str, Any],
    residency: Literal["swap"] | None = None,
    step: Sequence[str] | None = None,
    is_shared: bool = False,
) -> Budgets:
    """Return the budgets of a group.

    Args:
        slot: What its pool's slots have.
        group: What it has of each.
        roles: Its roles, as they were declared (`RoleSpec`).
        residency: Whether they take turns.
        step: The order in which they are called, again and again.
        is_shared: Whether other groups may have workers on the slots, too.

    Raises:
        ConfigError: They contradict each other.
    """
    of_slots, of_group = slot.limits("the pool's slots", is_shared=is_shared), group.limits("the group")
    for limit in of_group:
        for above in of_slots:
            if above.device is limit.device and above.nbytes < limit.nbytes:
                raise ConfigError(
                    f"the group may have {size_text(limit.nbytes)} ({limit.word}), and the pool's slots have "
                    f"{size_text(above.nbytes)} for it"
                )
    limits = [*of_slots, *of_group]
    for name, spec in roles.items():
        own = spec.budget.limits(f"role {name!r}", name)
        for limit in own:
            for above in limits:
                if above.role is None and above.device is limit.device and above.nbytes < limit.nbytes:
                    raise ConfigError(
                        f"role {name!r} can't fit: it may have {size_text(limit.nbytes)} ({limit.word}), and "
                        f"{above.owner} {size_text(above.nbytes)}"
                    )
        limits += own
    for name, spec in roles.items():
        if spec.activations and not any(each.device and each.role in (None, name) for each in limits):
            raise ConfigError(
                f"role {name!r}: reserve_activations keeps a part of device_memory free, and there is no budget of "
                "that: say device_memory= of the role, the group or the pool"
            )
    activations = {name: spec.activations for name, spec in roles.items() if spec.activations}
    for limit in limits:
        for name in activations if limit.device else ():
            if limit.role in (None, name) and activations[name] >= limit.nbytes:
                raise ConfigError(
                    f"role {name!r} can't fit: {size_text(activations[name])} are to stay free for what it computes "
                    f"with (reserve_activations), and {limit.owner} may have {size_text(limit.nbytes)} ({limit.word})"
                )
    return Budgets(tuple(limits), activations, *_turns(limits, roles, residency, step))


def _turns(
    limits: Sequence[Limit], roles: Mapping[str, Any], residency: str | None, step: Sequence[str] | None
) -> tuple[bool, tuple[str, ...]]:
    if residency not in (None, "swap"):
        raise ConfigError(f'residency={residency!r}: it is "swap", or None for roles that stay where they are')
    if residency is None:
        if step is not None:
            raise ConfigError('step= is the order in which roles take turns: it needs residency="swap"')
        return False, ()
    if background := [name for name, spec in roles.items() if spec.background]:
        raise ConfigError(
            f'residency="swap": roles that take turns run one after the other, and {", ".join(background)} is to run '
            "in the background: leave one of both out"
        )
    if not any(limit.role is None and limit.device for limit in limits):
        given = "; host_memory counts what sleeps, too" if any(not limit.device for limit in limits) else ""
        raise ConfigError(
            'residency="swap" keeps the roles of a group within device_memory (of a CPU slot, the host\'s): say it, as '
            f'in pool.spawn(..., residency="swap", device_memory="40GiB"){given}'
        )
    if isinstance(step, str):
        raise ConfigError(f"step={step!r} is a string; write step=({step!r}, ...)")
    if step is not None and (
        not isinstance(step, list | tuple) or not step or not all(isinstance(name, str) for name in step)
    ):
        raise ConfigError(f"step={shown(step)} is no list of roles; write step=({next(iter(roles))!r}, ...)")
    for name in step or ():
        if name not in roles:
            raise ConfigError(f"step= names role {name!r}: there are {', '.join(roles)}{did_you_mean(name, roles)}")
    return True, tuple(step or ())

"""Checks that the memory budgets of slots, groups and roles don't contradict each other, and derives the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from colocate._role.budget import Budget, Budgets, Limit
from colocate._system.nearest import did_you_mean
from colocate._system.numbers import format_size, format_value
from colocate.errors import ConfigError


def build_budgets(
    slot: Budget,
    group: Budget,
    roles: Mapping[str, Any],
    residency: Literal["swap"] | None = None,
    step: Sequence[str] | None = None,
    is_shared: bool = False,
) -> Budgets:
    """Check the declared memory budgets, and return the limits that a group's workers enforce.

    Args:
        slot: The budget of the pool's slots.
        group: The group's budget on each slot.
        roles: The declared roles (`RoleSpec`), by name.
        residency: Whether roles take turns.
        step: The order in which a step calls the roles, again and again.
        is_shared: Whether other groups may have workers on the slots, too.

    Raises:
        ConfigError: The budgets contradict each other.
    """
    of_slots, of_group = _build_limits(slot, "the pool's slots", is_shared=is_shared), _build_limits(group, "the group")
    for limit in of_group:
        for above in of_slots:
            if above.device is limit.device and above.nbytes < limit.nbytes:
                raise ConfigError(
                    f"the group may have {format_size(limit.nbytes)} ({limit.word}), and the pool's slots have "
                    f"{format_size(above.nbytes)} for it"
                )
    limits = [*of_slots, *of_group]
    for name, spec in roles.items():
        role_limits = _build_limits(spec.budget, f"role {name!r}", name)
        for limit in role_limits:
            for above in limits:
                if above.role is None and above.device is limit.device and above.nbytes < limit.nbytes:
                    raise ConfigError(
                        f"role {name!r} can't fit: it may have {format_size(limit.nbytes)} ({limit.word}), and "
                        f"{above.owner} {format_size(above.nbytes)}"
                    )
        limits += role_limits
    for name, spec in roles.items():
        if spec.activations and not any(
            limit_of_pool.device and limit_of_pool.role in (None, name) for limit_of_pool in limits
        ):
            raise ConfigError(
                f"role {name!r}: reserve_activations keeps a part of device_memory free, and there is no budget of "
                "that: say device_memory= of the role, the group or the pool"
            )
    activations = {name: spec.activations for name, spec in roles.items() if spec.activations}
    for limit in limits:
        for name in activations if limit.device else ():
            if limit.role in (None, name) and activations[name] >= limit.nbytes:
                raise ConfigError(
                    f"role {name!r} can't fit: {format_size(activations[name])} are to stay free for what it computes "
                    f"with (reserve_activations), and {limit.owner} may have {format_size(limit.nbytes)} ({limit.word})"
                )
    return Budgets(tuple(limits), activations, *_turn_options(limits, roles, residency, step))


def _build_limits(budget: Budget, owner: str, role: str | None = None, is_shared: bool = False) -> list[Limit]:
    sizes = ((True, budget.device), (False, budget.host))
    return [Limit(owner, role, device, nbytes, is_shared) for device, nbytes in sizes if nbytes is not None]


def _turn_options(
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
        note = "; host_memory counts what sleeps, too" if any(not limit.device for limit in limits) else ""
        raise ConfigError(
            'residency="swap" keeps the roles of a group within device_memory (of a CPU slot, the host\'s): say it, as '
            f'in pool.spawn(..., residency="swap", device_memory="40GiB"){note}'
        )
    if isinstance(step, str):
        raise ConfigError(f"step={step!r} is a string; write step=({step!r}, ...)")
    if step is not None and (
        not isinstance(step, list | tuple) or not step or not all(isinstance(name, str) for name in step)
    ):
        raise ConfigError(f"step={format_value(step)} is no list of roles; write step=({next(iter(roles))!r}, ...)")
    for name in step or ():
        if name not in roles:
            raise ConfigError(f"step= names role {name!r}: there are {', '.join(roles)}{did_you_mean(name, roles)}")
    return True, tuple(step or ())

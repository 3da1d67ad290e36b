"""`spawn`: a runtime, a pool and a group in one call, which end together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from colocate._api.connecting import connect, suggesting
from colocate._owned.owned import Making
from colocate._plugins.plugins import find_executor
from colocate._signals.at_work import waited_for
from colocate._system.tracebacks import without_own_frames
from colocate.errors import ColocateError
from colocate.worker.birth.imports import refuse_while_importing

if TYPE_CHECKING:
    from colocate._api.connection import Connection
    from colocate._api.group import ColocatedGroup
    from colocate._role.role import RoleSpec


def spawn(
    roles: Mapping[str, RoleSpec[Any]],
    *,
    slots: int = 1,
    executor: str = "local",
    gpus: int = 0,
    cpus: float = 1,
    host_memory: str | int | None = None,
    device_memory: str | int | None = None,
    strategy: str = "pack",
    env: Mapping[str, str] | None = None,
    reserve_timeout: float = 60.0,
    name: str | None = None,
    mesh: Mapping[str, Any] | None = None,
    on_failure: str = "fail",
    timeout: float | None = None,
    restarts: int = 3,
    restore: str | os.PathLike[str] | None = None,
    residency: Literal["swap"] | None = None,
    step: Sequence[str] | None = None,
    **options: Any,
) -> ColocatedGroup:
    """Connect, reserve slots and start a group on them: the way to a group of a script's own.

    The group is all that its runtime is for: closing the group, or leaving its `with` block, closes the pool and the
    runtime too. They are `group.owner` and `group.owner.owner`. Several groups, or pools, take the long way: `connect`,
    `Runtime.reserve`, `Pool.spawn`.

    Args:
        roles: The roles by name, as `colocate.role(...)` declares them; constructed in this order.
        slots: How many workers, each with every role.
        executor: The executor's name, as `connect` takes it.
        gpus: GPUs of each slot.
        cpus: CPUs of each slot.
        host_memory: The host's memory of each slot, as `Runtime.reserve` takes it.
        device_memory: The budget of what roles hold on each slot's device.
        strategy: "pack" on as few nodes as possible, or "spread" over as many.
        env: Environment variables, set in the workers before torch or a role is imported.
        reserve_timeout: Seconds to wait for slots while they could fit but don't now.
        name: Name of the group.
        mesh: Mesh of the roles that live on all slots and name none of their own.
        on_failure: "fail", or "restart": see `Pool.spawn`.
        timeout: Seconds that starting may take at most, also of a restart; None for no limit.
        restarts: How often it is rebuilt without a new checkpoint in between.
        restore: Folder of a checkpoint to start from.
        residency: "swap": roles take turns within `device_memory`.
        step: The roles in the order in which they are called, again and again.
        **options: What else `connect` takes: `seed`, `strict`, `replace` ..., and the executor's own options, such as
            `processes` of "local". Of those, `cpus`, `gpus` and `timeout` mean something else here; who needs them
            connects.

    Returns:
        The group; a context manager that closes everything.

    Raises:
        PluginError: There is no such executor, or it can't be imported.
        ConfigError: The declaration or an option is wrong.
        PlacementError: The slots can never fit; has a table of the nodes.
        PlacementTimeout: They don't fit now.
        CapabilityError: The executor lacks what was asked.
        RoleStartError: A role could not be constructed. Whatever it raises, nothing is left running.
    """
    refuse_while_importing("spawn(...)")
    making: Making[Connection] = Making(f"colocate.spawn(name={name!r})")

    def begin() -> Connection:
        with waited_for(), suggesting(spawn, find_executor(executor)):
            return making.made(connect(executor, **options)._node)

    def fill(connection: Connection) -> ColocatedGroup:
        from colocate._api.runtime import Runtime

        try:
            with waited_for():
                pool = Runtime._of(connection).reserve(
                    slots, gpus, cpus, host_memory, device_memory, strategy, reserve_timeout, env
                )
                group = pool.spawn(
                    roles, name, mesh, on_failure, timeout, restarts, restore, residency=residency, step=step
                )
        except BaseException as error:
            connection.close_after(error, "its failed spawn", 0.0)
            raise
        group._node.closed_as = connection
        return group

    try:
        return making.run(begin, fill)
    except ColocateError as error:  # which says itself what is wrong: not one of these frames does
        raise without_own_frames(error)  # noqa: B904 - it is the same one

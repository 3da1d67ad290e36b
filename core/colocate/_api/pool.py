"""`Pool`: the users' handle of slots reserved together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, overload

import attrs

from colocate._api.group import ColocatedGroup
from colocate._api.held import NodeHandle
from colocate._api.slots import Slots
from colocate._owned.owned import NodeBuilder
from colocate._plugins.needs import NEEDS, check_alone, check_needs
from colocate._role.budget import Budget, budgets
from colocate._role.role import RoleSpec
from colocate._signals.deferred import run_deferred
from colocate._signals.in_framework import check_may_wait
from colocate._system.numbers import (
    find_amount_problem,
    find_name_problem,
    find_variable_problem,
    format_value,
    parse_limit,
)
from colocate._system.tracebacks import drop_own_traceback
from colocate._worker_group.spawn import check_can_shrink, declare
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ColocateError, ConfigError, Mistake
from colocate.executor import OwnProcess


@attrs.frozen
class Slot:
    """One slot of a pool.

    Attributes:
        index: The slot's index in the pool.
        node: Name of the machine.
        devices: Indices of the slot's GPUs on the machine.
        state: "free", the names of the slot's groups ("policy", "policy, judge"), or "lost", if no group runs there.
    """

    index: int
    node: str
    devices: tuple[int, ...]
    state: str


@attrs.frozen(eq=False)
class PoolPart:
    """A part of a pool's slots, on which a group can be spawned. Dropping this object closes nothing."""

    pool: Pool
    indices: tuple[int, ...]

    @property
    def slots(self) -> list[Slot]:
        """The slots in this part of the pool."""
        return [self.pool.slots[index] for index in self.indices]

    def spawn(
        self,
        roles: Mapping[str, RoleSpec[Any]],
        name: str | None = None,
        mesh: Mapping[str, Any] | None = None,
        on_failure: str = "fail",
        timeout: float | None = None,
        restarts: int = 3,
        restore: str | os.PathLike[str] | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        residency: Literal["swap"] | None = None,
        step: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ColocatedGroup:
        """Spawn a group on the slots of this part; see `Pool.spawn`."""
        budget = Budget.from_sizes(device_memory, host_memory, "spawn() ")
        how = name, mesh, on_failure, timeout, restarts, restore, budget, residency, step, env
        return self.pool._spawn(self.indices, roles, *how)


class Pool(NodeHandle[Slots], node=Slots, by="runtime.reserve"):
    """Slots reserved together, all or none. Made by `runtime.reserve`; a `with` block closes the pool."""

    @property
    def slots(self) -> list[Slot]:
        """The slots of the pool, with the node, devices and groups of each."""
        node = self._node
        slots = []
        for index, place in enumerate(node.places):
            groups = ", ".join(group.name for group in node.groups_by_slot.get(index, ()) if index in group.indices)
            state = groups or ("lost" if node._is_lost(index) else "free")
            slots.append(Slot(index, place.node, place.devices, state))
        return slots

    @property
    def groups(self) -> dict[str, ColocatedGroup]:
        """The groups of the pool, by name."""
        return {worker_group.name: ColocatedGroup._wrap(worker_group) for worker_group in self._node.worker_groups}

    @property
    def spares(self) -> list[Slot]:
        """The pool's spares (`reserve(..., spares=1)`), with index -1; a spare's state is "spare" or "lost"."""
        lost = self._node.connection.services.executor.is_lost
        return [Slot(-1, place.node, place.devices, "lost" if lost(place) else "spare") for place in self._node.spares]

    def __len__(self) -> int:
        return len(self._node.places)

    @overload
    def __getitem__(self, key: int) -> PoolPart: ...
    @overload
    def __getitem__(self, key: slice) -> PoolPart: ...
    def __getitem__(self, key: int | slice) -> PoolPart:
        """Return a part of the pool, on which a group can be spawned."""
        everything = range(len(self))
        picked: Sequence[int] = everything[key] if isinstance(key, slice) else [everything[key]]
        if not picked:
            raise ConfigError(f"pool {self.name!r} has {len(self)} slots; {key!r} picks none of them")
        return PoolPart(self, tuple(picked))

    def spawn(
        self,
        roles: Mapping[str, RoleSpec[Any]],
        name: str | None = None,
        mesh: Mapping[str, Any] | None = None,
        on_failure: str = "fail",
        timeout: float | None = None,
        restarts: int = 3,
        restore: str | os.PathLike[str] | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        residency: Literal["swap"] | None = None,
        step: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ColocatedGroup:
        """Start one worker per slot, and construct the roles there. Returns when every rank has constructed every role.

        Args:
            roles: The roles by name, as `colocate.role(...)` declares them; constructed in this order.
            name: Name of the group, unique in the runtime: letters, digits, '-', '_' and '.', for file names.
            mesh: Mesh of the roles on all slots without a mesh of their own.
            on_failure: The consequence of a failure of the group: "fail", or "restart": the group is rebuilt in its
                pool, from the last `group.checkpoint(...)`; see `group.wait_ready`.
            timeout: Seconds for the start, and for each restart; None for no limit.
            restarts: Number of restarts without a new checkpoint in between, before the group fails for good.
            restore: Folder of a checkpoint to start from.
            device_memory: Limit of the roles' memory together on each slot's device, as "40GiB" or in bytes; see
                `group.memory()` for the count. A constructor or a call after which the roles exceed the limit fails
                with `MemoryBudgetError`, which lists each role's memory.
            host_memory: Limit on the host, sleeping memory included.
            residency: "swap": roles take turns. If `device_memory` requires it, idle roles sleep, and wake for their
                calls. For slots that are processes.
            step: The roles in the order of calls in one step, as in `("actor", "critic")`: the role with the
                farthest next turn sleeps first. By default, the least recently called role does.
            env: Environment variables of the workers, on top of the pool's (`Runtime.reserve`).

        Raises:
            ConfigError: The declaration is wrong; lists all mistakes.
            RoleStartError: A role could not be constructed; `errors` names each rank. Nothing is left running.
        """
        budget = Budget.from_sizes(device_memory, host_memory, "spawn() ")
        how = name, mesh, on_failure, timeout, restarts, restore, budget, residency, step, env
        return self._spawn(tuple(range(len(self))), roles, *how)

    def _spawn(
        self,
        indices: tuple[int, ...],
        roles: Mapping[str, RoleSpec[Any]],
        name: str | None,
        mesh: Mapping[str, Any] | None,
        on_failure: str,
        timeout: float | None,
        restarts: int,
        restore: str | os.PathLike[str] | None,
        budget: Budget,
        residency: Literal["swap"] | None,
        step: Sequence[str] | None,
        env: Mapping[str, str] | None,
    ) -> ColocatedGroup:
        node = self._node
        node.check_usable()
        if (problem := find_name_problem(name)) is not None:
            raise ConfigError(f"spawn(name) {problem}")
        if on_failure not in ("fail", "restart"):
            raise ConfigError(f"on_failure={on_failure!r}: it is 'fail' or 'restart'")
        if (problem := find_amount_problem(restarts, whole=True, least=1)) is not None:
            raise ConfigError(f"spawn(restarts) {problem}; a group that isn't restarted has on_failure='fail'")
        timeout = parse_limit(timeout, "spawn(timeout)")
        variables = check_environment(env, "spawn(...)")
        if variables:
            node.connection.require(OwnProcess, "set the environment of a worker (env=)")
        declared = declare(roles, len(indices), mesh)
        is_shared = node.request.groups > 1
        limits = budgets(node.budget, budget, declared.specs, residency, step, is_shared)
        if limits.swap:
            node.connection.require(OwnProcess, "have roles take turns, for which they sleep (residency=)")
        declared = attrs.evolve(declared, budgets=limits, env=variables)
        asking = {}
        for role, info in declared.infos.items():
            spec, kind = declared.specs[role], type(node.connection.services.executor)
            if spec.default_group or spec.env or spec.sleep or hasattr(info.cls, NEEDS):
                check_needs(role, info.cls, spec, len(info.slots), node.request.gpus, kind)
                asking[role] = info
        if asking:
            check_alone(asking)
        if on_failure == "restart" and node.least < node.request.slots:
            check_can_shrink(declared.specs, mesh, node.least, node.request.slots)
            if len(indices) < node.request.slots:
                raise ConfigError(
                    f"pool {node.name!r} has {node.least} to {node.request.slots} slots, so that a group that is "
                    "restarted may go on with fewer: spawn it on all of them, or reserve a fixed number"
                )
        making: NodeBuilder[WorkerGroup] = NodeBuilder(f"spawn(name={name!r})")

        def start() -> WorkerGroup:
            worker_group = making.set_node(
                node.add_group(indices, declared, name, restarts if on_failure == "restart" else 0)
            )
            try:
                if restore is not None:
                    cast("Any", worker_group.get_part("checkpoints")).set_start_folder(Path(restore))
                worker_group.start_workers(timeout)
            except BaseException as error:
                worker_group.close_after(error, "its failed start", 0.0)
                raise
            worker_group.services.notify_observers("colocate_group_spawned", ColocatedGroup._wrap(worker_group))
            return worker_group

        try:
            return making.build(start, ColocatedGroup._wrap)
        except ColocateError as error:  # Drop the traceback if all frames are colocate's own.
            raise drop_own_traceback(error)  # noqa: B904 - it is the same one

    def detach(self, name: str, ttl: float) -> None:
        """Hand the pool, with all groups, over to the cluster. For this driver, the pool is then closed.

        Any driver of the cluster may continue with the pool: `runtime.attach(name)`. Residents are freed.

        Args:
            name: The pool's name in the cluster, unique there.
            ttl: Seconds that the pool lives without a driver, from now on and from the end of each borrow. Then it
                ends.

        Raises:
            CapabilityError: The executor ends with its driver, and everything with it.
            ConfigError: The pool was reserved without `detachable=True`, or the name is taken.
            ColocateError: Calls are pending, or another group uses the pool's residents.
        """
        check_may_wait(f"detaching {self._node.kind} {self.name!r}")

        def detach() -> None:
            from colocate._api import detached

            detached.detach(self._node, name, ttl)

        run_deferred(detach)

    def close(self, grace: float = 10.0, force: bool = False) -> None:
        """Close the groups, the newest first, and release the slots. A pool attached without `own=True` stays alive.

        Args:
            grace: Seconds that running calls have to finish; `math.inf` waits for ever.
            force: Close the pool although groups elsewhere use residents of its groups.

        Raises:
            BorrowedError: A group elsewhere uses a resident (without `force`).
            ExceptionGroup: The errors, after everything has been freed.
        """
        self._node.close_by_caller(grace, force)


def check_environment(env: Any, what: str) -> dict[str, str]:
    """Return environment variables as strings, or raise `ConfigError` with all mistakes; `what` names the call."""
    variables = {} if env is None else env
    if not isinstance(variables, Mapping):
        raise ConfigError(f"{what} env must be a mapping from variables to values, not {format_value(env)}")
    problems = {key: find_variable_problem(key, value) for key, value in variables.items()}
    mistakes = [Mistake(f"env.{key!r}", None, why) for key, why in problems.items() if why is not None]
    if mistakes:
        raise ConfigError(f"{what} has an invalid environment", mistakes=tuple(mistakes))
    return {key: str(value) for key, value in variables.items()}

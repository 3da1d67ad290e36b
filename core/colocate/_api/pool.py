"""`Pool`: slots reserved together, as users hold it, and the groups that they spawn there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, overload

import attrs

from colocate._api.group import ColocatedGroup
from colocate._api.held import Held
from colocate._api.slots import Slots
from colocate._owned.owned import Making
from colocate._plugins.needs import NEEDS, check_alone, check_needs
from colocate._role.budget import Budget, budgets
from colocate._role.role import RoleSpec
from colocate._signals.deferred import run_deferred
from colocate._signals.in_framework import refuse_to_wait
from colocate._system.numbers import amount_problem, limit, name_problem, shown, variable_problem
from colocate._system.tracebacks import without_own_frames
from colocate._worker_group.spawn import declare, refuse_fixed
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ColocateError, ConfigError, Mistake
from colocate.executor import OwnProcess


@attrs.frozen
class Slot:
    """One slot of a pool.

    Attributes:
        index: Its index in the pool.
        node: Name of the machine.
        devices: Indices of its GPUs there.
        state: "free", the names of the groups that have it ("policy", "policy, judge"), or "lost", where none goes on
            with it.
    """

    index: int
    node: str
    devices: tuple[int, ...]
    state: str


@attrs.frozen(eq=False)
class PoolPart:
    """Some slots of a pool, to spawn on. A name: it owns nothing and decides no lifetime."""

    pool: Pool
    indices: tuple[int, ...]

    @property
    def slots(self) -> list[Slot]:
        """The slots of the part."""
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
        """As `Pool.spawn`, on these slots."""
        budget = Budget.of(device_memory, host_memory, "spawn() ")
        how = name, mesh, on_failure, timeout, restarts, restore, budget, residency, step, env
        return self.pool._spawn(self.indices, roles, *how)


class Pool(Held[Slots], node=Slots, by="runtime.reserve"):
    """Slots reserved together, all or none. Made by `runtime.reserve`; a context manager that closes it."""

    @property
    def slots(self) -> list[Slot]:
        """The slots of the pool: node, devices, and the groups on each."""
        node = self._node
        found = []
        for index, place in enumerate(node.places):
            groups = ", ".join(each.name for each in node.taken.get(index, ()) if index in each.indices)
            state = groups or ("lost" if node._is_lost(index) else "free")
            found.append(Slot(index, place.node, place.devices, state))
        return found

    @property
    def groups(self) -> dict[str, ColocatedGroup]:
        """The groups on it by name."""
        return {worker_group.name: ColocatedGroup._of(worker_group) for worker_group in self._node.worker_groups}

    @property
    def spares(self) -> list[Slot]:
        """The pool's spares (`reserve(..., spares=1)`), with the index of none; their state is "spare" or "lost"."""
        lost = self._node.connection.services.executor.lost
        return [Slot(-1, place.node, place.devices, "lost" if lost(place) else "spare") for place in self._node.spares]

    def __len__(self) -> int:
        return len(self._node.places)

    @overload
    def __getitem__(self, key: int) -> PoolPart: ...
    @overload
    def __getitem__(self, key: slice) -> PoolPart: ...
    def __getitem__(self, key: int | slice) -> PoolPart:
        """Pick some slots of the pool, to spawn on."""
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
        """Start one worker per slot and construct the roles in it; returns when every role of every rank is there.

        Args:
            roles: The roles by name, as `colocate.role(...)` declares them; constructed in this order.
            name: Name of the group, unique in the runtime: letters, digits, '-', '_' and '.', as files are called so.
            mesh: Mesh of the roles that live on all slots and name none of their own.
            on_failure: What happens when the group fails: "fail", or "restart": it is rebuilt in its pool, from its
                last `group.checkpoint(...)`; see `group.wait_ready`.
            timeout: Seconds that starting may take at most, also of a restart; None for no limit.
            restarts: How often it is rebuilt without a new checkpoint in between, before it fails for good.
            restore: Folder of a checkpoint to start from.
            device_memory: How much memory of each slot's device its roles may have together, as "40GiB" or in bytes;
                see `group.memory()` for what is counted. When they hold more as one is constructed or after a call,
                that fails with `MemoryBudgetError`, which says who has what.
            host_memory: How much of the host's, with what sleeps.
            residency: "swap": roles take turns. Where `device_memory` needs it, who isn't called sleeps, and wakes for
                its call. For slots that are processes.
            step: The roles in the order in which they are called, again and again, as in `("actor", "critic")`: whose
                next turn is farthest makes room then. By default who was called longest ago does.
            env: Environment variables of its workers, on top of the pool's (`Runtime.reserve`).

        Raises:
            ConfigError: The declaration is wrong; says all mistakes.
            RoleStartError: A role could not be constructed; `errors` names each rank. Nothing is left running.
        """
        budget = Budget.of(device_memory, host_memory, "spawn() ")
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
        node.check()
        if (problem := name_problem(name)) is not None:
            raise ConfigError(f"spawn(name) {problem}")
        if on_failure not in ("fail", "restart"):
            raise ConfigError(f"on_failure={on_failure!r}: it is 'fail' or 'restart'")
        if (problem := amount_problem(restarts, whole=True, least=1)) is not None:
            raise ConfigError(f"spawn(restarts) {problem}; a group that isn't restarted has on_failure='fail'")
        timeout = limit(timeout, "spawn(timeout)")
        variables = environment(env, "spawn(...)")
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
            refuse_fixed(declared.specs, mesh, node.least, node.request.slots)
            if len(indices) < node.request.slots:
                raise ConfigError(
                    f"pool {node.name!r} has {node.least} to {node.request.slots} slots, so that a group that is "
                    "restarted may go on with fewer: spawn it on all of them, or reserve a fixed number"
                )
        making: Making[WorkerGroup] = Making(f"spawn(name={name!r})")

        def start() -> WorkerGroup:
            worker_group = making.made(node.occupy(indices, declared, name, restarts if on_failure == "restart" else 0))
            try:
                if restore is not None:
                    cast("Any", worker_group.part("checkpoints")).begins_at(Path(restore))
                worker_group.start(timeout)
            except BaseException as error:
                worker_group.close_after(error, "its failed start", 0.0)
                raise
            worker_group.services.tell("colocate_group_spawned", ColocatedGroup._of(worker_group))
            return worker_group

        try:
            return making.run(start, ColocatedGroup._of)
        except ColocateError as error:  # which says itself what is wrong: not one of these frames does
            raise without_own_frames(error)  # noqa: B904 - it is the same one

    def detach(self, name: str, ttl: float) -> None:
        """Give it, with its groups, to the cluster; this driver is through with it, as if it were closed.

        Any driver of the cluster may go on with it: `runtime.attach(name)`. Residents are freed.

        Args:
            name: What it is called there; unique in the cluster.
            ttl: Seconds that it lives without a driver, from now on and from the end of each borrow. Then it ends.

        Raises:
            CapabilityError: The executor ends with its driver, and everything with it.
            ConfigError: It was reserved without `detachable=True`, or the name is taken.
            ColocateError: Calls are pending, or another group uses its residents.
        """
        refuse_to_wait(f"detaching {self._node.kind} {self.name!r}")

        def detach() -> None:
            from colocate._api import detached  # which nothing else of core needs

            detached.detach(self._node, name, ttl)

        run_deferred(detach)

    def close(self, grace: float = 10.0, force: bool = False) -> None:
        """Close its groups, the newest first, and give its slots back. One that is attached without `own=True` goes on.

        Args:
            grace: Seconds that running calls have to finish; `math.inf` waits for them for ever.
            force: Close it although groups elsewhere use residents of its groups.

        Raises:
            BorrowedError: A group elsewhere uses a resident (without `force`).
            ExceptionGroup: What went wrong, after everything has been freed.
        """
        self._node.close_by_caller(grace, force)


def environment(env: Any, what: str) -> dict[str, str]:
    """Return environment variables as they were given to `what`, or raise `ConfigError` with all that is wrong."""
    given = {} if env is None else env
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} env must be a mapping from variables to values, not {shown(env)}")
    problems = {key: variable_problem(key, value) for key, value in given.items()}
    mistakes = [Mistake(f"env.{key!r}", None, why) for key, why in problems.items() if why is not None]
    if mistakes:
        raise ConfigError(f"{what} was asked for what can't be", mistakes=tuple(mistakes))
    return {key: str(value) for key, value in given.items()}

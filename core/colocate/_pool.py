"""`Pool`: slots reserved together, and the groups that live on them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import attrs

from colocate._epochs import base_of
from colocate._group import ColocatedGroup
from colocate._needs import check_needs
from colocate._numbers import amount_problem, limit, seconds
from colocate._off_main import off_main
from colocate._owned import Making, Owned, raise_together
from colocate._role import RoleSpec
from colocate._spawn import Declared, declare
from colocate._tracebacks import without_own_frames
from colocate.errors import ColocateError, ConfigError, PlacementError, PlacementTimeout
from colocate.executor import Place, Request, Reservation

if TYPE_CHECKING:
    from colocate._detached import Tenancy
    from colocate._runtime import Runtime


_WAITS_S = 2.0  # at a time, for slots in place of lost ones: who closes the pool meanwhile waits for that
_LEAST_GRACE_S = 0.5


@attrs.frozen
class Slot:
    """One slot of a pool.

    Attributes:
        index: Its index in the pool.
        node: Name of the machine.
        devices: Indices of its GPUs there.
        state: "free", or the name of the group that has it.
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
        """Its slots."""
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
    ) -> ColocatedGroup:
        """As `Pool.spawn`, on these slots."""
        return self.pool._spawn(self.indices, roles, name, mesh, on_failure, timeout, restarts, restore)


class Pool(Owned):
    """Slots reserved together, all or none. Made by `runtime.reserve`; a context manager that closes it.

    Attributes:
        places: Where its slots lie.
    """

    def __init__(self, runtime: Runtime, name: str, request: Request) -> None:
        """Use `runtime.reserve`."""
        super().__init__("pool", name, runtime)
        self.runtime = runtime
        self.request = request
        self.reservation: Reservation | None = None
        self.epoch = 1
        self.tenancy: Tenancy | None = None
        self.places: tuple[Place, ...] = ()
        self._taken: dict[int, ColocatedGroup] = {}
        self.lock = threading.RLock()
        self.join()

    @property
    def base(self) -> int:
        """Numbers of calls, holds and residents of this driver's are above this (see `_epochs.py`)."""
        return base_of(self.epoch)

    def hold(self, reservation: Reservation) -> None:
        """Take the slots, or give them back at once when it has been closed meanwhile."""
        with self.lock:
            if self.closed_by is None:
                self.reservation = reservation
                self.places = reservation.places
                return
        self._give_back(reservation)
        self.check()

    @property
    def slots(self) -> list[Slot]:
        """Its slots: node, devices, and the group on each."""
        taken = self._taken  # replaced by another one when a group goes
        return [
            Slot(index, place.node, place.devices, taken[index].name if index in taken else "free")
            for index, place in enumerate(self.places)
        ]

    @property
    def groups(self) -> dict[str, ColocatedGroup]:
        """The groups on it by name."""
        return {group.name: group for group in list(self._taken.values())}

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, key: int) -> PoolPart: ...
    @overload
    def __getitem__(self, key: slice) -> PoolPart: ...
    def __getitem__(self, key: int | slice) -> PoolPart:
        """Some of its slots, to spawn on."""
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
    ) -> ColocatedGroup:
        """Start one worker per slot and construct the roles in it; returns when every role of every rank is there.

        Args:
            roles: The roles by name, as `colocate.role(...)` declares them; constructed in this order.
            name: Name of the group, unique in the runtime.
            mesh: Mesh of the roles that live on all slots and name none of their own.
            on_failure: What happens when the group fails: "fail", or "restart": it is rebuilt in its pool, from its
                last `group.checkpoint(...)`; see `group.wait_ready`.
            timeout: Seconds that starting may take at most, also of a restart; None for no limit.
            restarts: How often it is rebuilt without a new checkpoint in between, before it fails for good.
            restore: Folder of a checkpoint to start from.

        Raises:
            ConfigError: The declaration is wrong; says all mistakes.
            RoleStartError: A role could not be constructed; `errors` names each rank. Nothing is left running.
        """
        return self._spawn(tuple(range(len(self))), roles, name, mesh, on_failure, timeout, restarts, restore)

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
    ) -> ColocatedGroup:
        self.check()
        if on_failure not in ("fail", "restart"):
            raise ConfigError(f"on_failure={on_failure!r}: it is 'fail' or 'restart'")
        if (problem := amount_problem(restarts, whole=True, least=1)) is not None:
            raise ConfigError(f"spawn(restarts) {problem}; a group that isn't restarted has on_failure='fail'")
        timeout = limit(timeout, "spawn(timeout)")
        declared = declare(roles, len(indices), mesh)
        for role, info in declared.infos.items():
            default = declared.specs[role].default_group
            check_needs(role, info.cls, default, len(info.slots), type(self.runtime.executor))
        making: Making[ColocatedGroup] = Making(f"spawn(name={name!r})")

        def start() -> ColocatedGroup:
            group = making.made(self._occupy(indices, declared, name, restarts if on_failure == "restart" else 0))
            try:
                group.start(timeout, None if restore is None else Path(restore))
            except BaseException as error:
                group.close_after(error, "its failed start", 0.0)
                raise
            if self.runtime.observers:
                self.runtime.dispatcher.soon(lambda: self.runtime.observers.tell("colocate_group_spawned", group))
            return group

        try:
            return making.run(start)
        except ColocateError as error:  # which says itself what is wrong: not one of these frames does
            raise without_own_frames(error)  # noqa: B904 - it is the same one

    def _occupy(self, indices: tuple[int, ...], declared: Declared, name: str | None, restarts: int) -> ColocatedGroup:
        with self.lock:
            self.check()
            if self.reservation is None:
                raise self.unreserved()
            busy = {index: self._taken[index].name for index in indices if index in self._taken}
            if busy:
                index, holder = next(iter(busy.items()))
                raise ColocateError(
                    f"slot {index} of pool {self.name!r} is taken by group {holder!r}: a slot takes one group at a "
                    "time. Put the roles into one group, close the other one, or spawn on a part: pool[a:b].spawn(...)"
                )
            return self.place(indices, declared, name, restarts)

    def place(
        self, indices: Sequence[int], declared: Declared, name: str | None, restarts: int, generation: int = 0
    ) -> ColocatedGroup:
        """Put a group on free slots; nothing is started."""
        with self.runtime.naming:
            name = self.runtime.group_name(name)
            group = ColocatedGroup(self, indices, declared, name, restarts, generation)
            self.runtime.groups[name] = group
        for index in indices:
            self._taken[index] = group
        return group

    def places_for(self, group: ColocatedGroup) -> list[Place]:
        """Where a group's slots lie. If the engine has lost some, all of the pool's are reserved anew.

        Raises:
            PlacementError: What is left of the cluster has no place for them.
        """
        executor = self.runtime.executor
        given_back = self.reservation is None  # by an attempt before this one
        lost = [index for index in group.indices if given_back or executor.lost(self.places[index])]
        if lost:
            self._reserve_again(group, lost)
        return [self.places[index] for index in group.indices]

    def unreserved(self, what: str = "") -> ColocateError:
        """The error of a use while no slots are reserved for it; `what` comes of that. Its lock is held."""
        if any(group.restarts.under_way for group in self.groups.values()):
            then = "which the restart of its group does: wait for that with group.wait_ready(), or reserve another pool"
        else:
            then = "and the restart of its group, which does that, was given up: close it, and reserve another pool"
        return ColocateError(
            f"pool {self.name!r} {what}has lost slots with their node and has to be reserved anew, {then}"
        )

    def _reserve_again(self, group: ColocatedGroup, lost: Sequence[int]) -> None:
        with self.lock:
            self.check()
            gone = ", ".join(f"{index} on {self.places[index].node}" for index in lost)
            if self.tenancy is not None:
                raise PlacementError(
                    f"pool {self.name!r} has lost slot {gone}; it was detached as {self.tenancy.name!r}, and such a "
                    "pool isn't reserved anew"
                )
            others = {other.name for other in self._taken.values() if other is not group}
            if others:
                raise PlacementError(
                    f"pool {self.name!r} has lost slot {gone}; it can't be reserved anew while group "
                    f"{', '.join(sorted(others))} lives on others of its slots"
                )
            reservation, self.reservation = self.reservation, None
        if reservation is not None:
            self.runtime.executor.release(reservation)
        deadline = time.monotonic() + self.request.timeout
        while self.reservation is None:
            self.check()  # whoever closes it doesn't wait for all of that time
            left = max(0.0, deadline - time.monotonic())
            try:
                self.hold(self.runtime.executor.reserve(attrs.evolve(self.request, timeout=min(left, _WAITS_S))))
            except PlacementTimeout as error:
                if left <= _WAITS_S:
                    error.add_note(f"that was tried for {self.request.timeout:g} s, since slot {gone} was lost")
                    raise

    def vacate(self, group: ColocatedGroup) -> None:
        """A group has gone: its slots are free."""
        with self.lock:
            self._taken = {index: other for index, other in self._taken.items() if other is not group}
            self.runtime.forget(group)
        self.changed()

    # -- from driver to driver

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
        from colocate._detached import detach

        off_main(lambda: detach(self, name, ttl))

    def goes_on(self, group: ColocatedGroup) -> bool:
        """Whether a group lives on when this driver lets go of it."""
        return self.tenancy is not None and not self.tenancy.own and group.name in self.tenancy.kept

    def changed(self) -> None:
        """Its groups aren't the ones that they were; drivers after this one are to know."""
        if self.tenancy is not None:
            from colocate._detached import changed

            changed(self)

    @property
    def borrowed(self) -> bool:
        """Whether closing it ends this driver's borrow only."""
        return self.tenancy is not None and not self.tenancy.own

    def close(self, grace: float = 10.0, force: bool = False) -> None:
        """Close its groups, the newest first, and give its slots back. One that is attached without `own=True` goes on.

        Args:
            grace: Seconds that running calls have to finish; `math.inf` waits for them for ever.
            force: Close it although groups elsewhere use residents of its groups.

        Raises:
            BorrowedError: A group elsewhere uses a resident (without `force`).
            ExceptionGroup: What went wrong, after everything has been freed.
        """
        self.close_here(self.by_caller(), seconds(grace, "close(grace)"), force)

    def close_for(self, by: str | None, grace: float, force: bool) -> None:
        """Close it on behalf of `by` (None: of its caller)."""
        if self.forked:
            self.check()
        if not force and self.closed_by is None:
            self.refuse_if_borrowed()
        if not self.take_closing(by):
            return
        self.state = "closing"
        with self.lock:  # whoever has passed the check before is done: its group is a child, its slots are held
            reservation = self.reservation
        errors: list[BaseException] = []
        try:
            errors += close_children(self, grace)
        finally:
            try:
                if reservation is not None:
                    self._give_back(reservation)
            except Exception as error:
                errors.append(error)
            finally:
                self.state = "closed"
                self.disown()
                self._finished.set()
        raise_together(f"pool {self.name!r} was closed, and this had gone wrong", errors)

    def give_up(self, by: str) -> None:
        """Close it at once: who was making it has been interrupted. One that was to be attached goes on."""
        if self.tenancy is not None:
            self.tenancy.own = False
        elif self.reservation is None:
            self.runtime.executor.withdraw(self.request)
        super().give_up(by)

    def _give_back(self, reservation: Reservation) -> None:
        executor: Any = self.runtime.executor
        if self.tenancy is None or (self.tenancy.own and executor.retain(reservation)):
            executor.release(reservation)
        else:  # it goes on: it is borrowed, or another driver has taken it while it was being closed here
            executor.let_go(reservation)


def close_children(owner: Owned, grace: float) -> list[BaseException]:
    """Close what a node owns, the newest first; what went wrong.

    The grace period is one for all: whatever runs there is told at once that nobody waits for it any more, and what
    waits behind that doesn't begin in its place. What still runs when it is over has had it, whoever's turn it is.
    """
    errors: list[BaseException] = []
    children = list(owner.children.values())
    deadline = time.monotonic() + grace
    for child in children:
        child.wind_down(grace, deadline)
    for child in reversed(children):
        if owner.hurried:  # Ctrl-C: the others are closed too, but nobody waits any more
            grace = deadline = 0.0
        left = grace if child is children[-1] else max(deadline - time.monotonic(), _least(grace))
        try:
            child.close_for(f"closing {owner.kind} {owner.name!r} ({owner.closed_by})", left, force=True)
        except BaseExceptionGroup as group:
            errors += group.exceptions
        except BaseException as error:
            errors.append(error)
    return errors


def _least(grace: float) -> float:
    """Seconds that what is idle needs to end, also when others have used the grace up."""
    return min(grace, _LEAST_GRACE_S)
